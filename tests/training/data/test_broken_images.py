"""The share of an epoch's images that may be broken."""

import pytest

from torch_thor.training import UserError
from torch_thor.training.data.broken_images import BrokenImages


def test_the_share_is_that_of_an_epoch_not_of_the_run():
    broken = BrokenImages(0.1, lambda _: None)
    for epoch in range(5):
        broken.begin(epoch, start=0)
        broken.add(epoch, "a", "b", images=10)
    assert broken.count == 5
    broken.add(4, "a", "b", images=10)  # the same image counts once
    broken.begin(4, start=3)  # resumed in the middle: the count goes on
    with pytest.raises(UserError, match="2 of an epoch's 10 images"):
        broken.add(9, "a", "b", images=10)


def test_a_share_is_less_than_one():
    with pytest.raises(UserError, match=r"data\.max_broken=1 must be a fraction"):
        BrokenImages(1, print)
