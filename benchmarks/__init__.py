"""Benchmarks and figures of the repository, which no wheel contains: ``python -m benchmarks``.

Tables and pictures are made only from the raw data in ``results/``.
"""
