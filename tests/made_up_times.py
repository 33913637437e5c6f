"""Times to invert blocks that are made up: a machine measures other ones each time."""

from unittest import mock

from torch_thor.split import choice


def made_up_times(seconds):
    """Have `seconds(sizes, split_dims, **options)` take the place of measuring, in a `with` block."""
    return mock.patch.object(choice, "inverse_seconds", seconds)
