"""The training loop: steps, precision, processes, evaluation. It uses the interface of a task and no image code."""
