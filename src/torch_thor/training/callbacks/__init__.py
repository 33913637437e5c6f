"""Callbacks of the training loop: the metrics file, progress display, TensorBoard and the profiler."""
