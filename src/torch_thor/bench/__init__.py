"""Comparisons and figures: one runner, raw data that are kept, and tables and pictures made from these alone."""
