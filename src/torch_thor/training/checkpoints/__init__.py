"""Checkpoints, the weights that a training starts from, and the folder of a run."""
