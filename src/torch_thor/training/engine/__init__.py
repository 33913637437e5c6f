"""The training loop: steps, precision, processes, evaluation. It knows a task and nothing of images."""
