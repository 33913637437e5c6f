"""THOR: the optimizer, its update rules, and what a step needs."""
