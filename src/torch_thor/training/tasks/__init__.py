"""Tasks: a task is a network, its data, its loss and its metrics."""
