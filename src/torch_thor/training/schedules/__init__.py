"""Schedules of the learning rate and of the damping: the settings, the formulas, and how they reach an optimizer."""

from torch_thor.training.schedules.curves import factor
from torch_thor.training.schedules.spec import ScheduleSpec
from torch_thor.training.schedules.steering import apply, check

__all__ = ["ScheduleSpec", "apply", "check", "factor"]
