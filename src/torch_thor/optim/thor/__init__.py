"""The optimizer THOR: its step, its update rules, its state and its checks."""
