"""Schedules of the learning rate and the damping: their settings and their formulas."""
