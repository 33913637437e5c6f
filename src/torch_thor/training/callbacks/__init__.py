"""What watches a training: the metrics file, progress, TensorBoard, the profiler."""
