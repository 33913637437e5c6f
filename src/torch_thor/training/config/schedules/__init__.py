"""Schedules of the learning rate and of the damping: their settings and their formulas."""

from torch_thor.training.config.schedules.curves import factor

__all__ = ["factor"]
