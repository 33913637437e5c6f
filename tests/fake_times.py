"""Fixed times to invert blocks, in place of measured times, which differ from run to run."""

from unittest import mock


def fake_times(seconds):
    """In a block, `seconds(sizes, split_dims, **options)` replaces the measurement."""
    return mock.patch("torch_thor.split.inverse_seconds", seconds)
