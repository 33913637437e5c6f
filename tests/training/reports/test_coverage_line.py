"""The line on THOR's coverage: counts of layers and weights by hand; printed once for each run with THOR."""

import pytest
from torch import nn

from torch_thor import THOR, ThorMuon
from torch_thor.training.reports.coverage_line import coverage_line


def network():
    return nn.Sequential(nn.Linear(9, 10), nn.LayerNorm(10), nn.Linear(10, 20), nn.LayerNorm(20), nn.BatchNorm1d(20))


@pytest.mark.parametrize(("optimizer", "biases", "rest"), [(THOR, 10 + 20, "plain momentum"), (ThorMuon, 0, "AdamW")])
def test_layers_and_weights_are_counted(optimizer, biases, rest):
    covered, total = 9 * 10 + 10 * 20 + biases, 9 * 10 + 10 + 10 * 20 + 20 + 2 * 10 + 4 * 20
    line = coverage_line(optimizer(network()))
    share = f"{covered / total:.2%} of the trained parameters"
    others = f"BatchNorm1d (1), LayerNorm (2){'' if biases else ', biases of Linear (2)'}"
    assert line.startswith(f"{optimizer.__name__} preconditions 2 layers with {share}; {rest} for the rest: {others}; ")


def test_frozen_weights_do_not_count_and_nothing_may_be_left():
    model = network()
    for layer in (model[1], model[3], model[4]):
        layer.requires_grad_(False)
    assert coverage_line(THOR(model)) == "THOR preconditions 2 layers with 100.00% of the trained parameters"


def test_a_training_prints_it_once_for_thor_only(run):
    code, out, err = run(
        "train", "digits", "optimizer=thor,sgd", "steps=2", "eval_interval=2", "device=cpu", "--out", "run"
    )
    assert code == 0, err
    [line] = [line for line in out.splitlines() if "preconditions" in line]
    assert line.startswith("thor: THOR preconditions ")
