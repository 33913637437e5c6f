"""The figures of the paper on small data sets. Measurements are stored as raw data, from which figures are drawn."""
