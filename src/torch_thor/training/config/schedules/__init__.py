"""Schedules of the learning rate and of the damping: their settings and their formulas."""
