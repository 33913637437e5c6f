"""Data-parallel training: all ranks sum statistics on refresh steps, and raise errors together.

It implements :class:`torch_thor.curvature.communication.Processes`, on which
:mod:`torch_thor.curvature` depends.
"""
