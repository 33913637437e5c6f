"""The small ImageNet as fixtures."""

import pytest

from image_tree import write_tree


@pytest.fixture(scope="session")
def imagenet(tmp_path_factory):
    """Shared by all tests: read it, never write to it."""
    return write_tree(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "data")
