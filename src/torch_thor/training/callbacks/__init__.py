"""Callbacks of the training loop: the metrics file, progress, TensorBoard, the profiler."""
