"""Benchmarks and figures: a runner that stores raw data, and tables and pictures that are made from raw data alone."""
