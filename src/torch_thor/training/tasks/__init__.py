"""Tasks. A task consists of a network, its data, its loss and its metrics."""
