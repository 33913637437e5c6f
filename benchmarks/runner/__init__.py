"""What the benchmarks share: a runner that stores raw data, and tables, pictures and times."""
