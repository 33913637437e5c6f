"""Data-parallel training: statistics of all ranks on refresh steps, and errors that all of them see.

Curvature does not know of this package: it is handed what :class:`torch_thor.curvature.processes.Processes` describes.
"""
