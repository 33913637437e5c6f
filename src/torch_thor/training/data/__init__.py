"""Batches: which samples each process gets, and the readers of images and text behind them."""
