"""Data-parallel training: statistics are summed over all ranks on refresh steps, and all ranks raise the same errors.

It implements :class:`torch_thor.curvature.processes.Processes`, on which :mod:`torch_thor.curvature` depends.
"""
