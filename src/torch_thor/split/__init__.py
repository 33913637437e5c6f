"""The hardware-aware choice of the split dimension (Chen et al. 2021, section 3.3).

Large blocks lose little of a factor, small blocks are quick to invert. Both are measured, for one model on one device,
and the choice lies where the two curves cross.
"""
