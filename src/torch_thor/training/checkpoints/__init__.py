"""Checkpoints, the initial weights of a training, and the folder of a run."""
