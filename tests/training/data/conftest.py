"""The small ImageNet as a fixture."""

import pytest

from image_tree import write_tree


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "data")
