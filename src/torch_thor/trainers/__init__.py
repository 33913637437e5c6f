"""For training loops that others wrote."""
