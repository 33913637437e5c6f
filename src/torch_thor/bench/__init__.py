"""Benchmarks and figures: a runner that stores raw data, and tables and pictures from it.

Tables and pictures are made from raw data alone.
"""
