"""The paper's figures on data at hand: each measured into raw data that is kept, and drawn from that alone."""
