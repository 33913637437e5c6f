"""The paper's figures on small data sets: each is measured into raw data, and drawn from these alone."""
