"""The optimizers THOR, ThorMuon, AGC-SGD and LAMB, and adaptive gradient clipping for any other."""
