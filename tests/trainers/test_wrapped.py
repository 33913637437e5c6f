"""The coverage of an optimizer that a trainer has wrapped."""

from types import SimpleNamespace

import pytest
import torch

import torch_thor
from tiny import mlp
from torch_thor import ThorMuon


def test_coverage_of_what_a_trainer_has_wrapped():
    optimizer = ThorMuon(mlp())
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(_optimizer=optimizer))
    assert torch_thor.coverage(wrapped) == torch_thor.coverage(optimizer) == optimizer.coverage()
    itself = SimpleNamespace()
    itself.optimizer = itself
    for other in (
        torch.optim.SGD(mlp().parameters()),
        SimpleNamespace(optimizer=None),
        itself,
        None,
    ):
        with pytest.raises(
            TypeError, match=rf"coverage\({type(other).__name__}\): must be THOR or ThorMuon"
        ):
            torch_thor.coverage(other)
