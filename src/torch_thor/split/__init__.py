"""The hardware-aware choice of the split dimension (Chen et al. 2021, section 3.3).

Large blocks lose little of a factor, and small blocks are fast to invert. Both effects are measured
for one model on one device, and the split dimension is chosen where the two curves cross.
"""
