"""Data sets and their batches: which samples each process gets, and how images and text are read."""
