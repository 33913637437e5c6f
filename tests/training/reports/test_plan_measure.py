"""Measuring the costs of a device: what is timed, without any limit for the times."""

import time
from collections import Counter

import pytest
import torch
from torch import nn

from torch_thor import THOR
from torch_thor.training import UserError
from torch_thor.training.reports.plan_measure import Sample, block_counts, clock_of, inversion_shapes, measure_costs

CPU = torch.device("cpu")


def sample():
    model = nn.Sequential(nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 3))
    seen = []

    def loss(model, samples):
        seen.append(samples)
        return model(torch.randn(samples, 20)).square().mean()

    return Sample(model, loss, "vectors"), seen


def test_steps_with_all_and_half_of_the_samples():
    given, seen = sample()
    costs = measure_costs("mine", given, CPU, local_batch=6, split_dim=8, optimizer="thor", rounds=2)
    assert seen == [6, 6, 3, 3] * 3
    assert set(costs.seconds) >= {"ordinary 6", "step 3", "refresh 6", "pack", "unpack", "copy"}
    assert all(len(times) == 2 for times in costs.seconds.values())
    assert [one.size for one in costs.inversion] == [1, 2, 4, 8]
    assert costs.step > 0
    assert costs.machine["rounds"] == 2


def test_blocks_of_layers():
    """Blocks of 8, 8, 4 (A), 8, 1 (G), 8, 1 (A) and 3 (G)."""
    layers = THOR(sample()[0].model, split_dim=8).curvature.values()
    counts = block_counts(layers)
    assert counts == Counter({8: 4, 1: 2, 4: 1, 3: 1})
    assert inversion_shapes(counts) == [(1, 1), (1, 2), (2, 1), (2, 16), (4, 1), (4, 2), (8, 1), (8, 4)]
    assert inversion_shapes(Counter({2048: 50})).count((2048, 2)) == 1  # no more memory than a limit


def test_clock_of_one_thread_is_that_of_the_processor():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert clock_of(CPU) is time.thread_time
        torch.set_num_threads(2)
        assert clock_of(CPU) is time.perf_counter
    finally:
        torch.set_num_threads(threads)


def test_a_model_that_fails_gets_one_line():
    model = nn.Linear(4, 3)
    broken = Sample(model, lambda model, samples: model(torch.randn(samples, 5)).sum(), "vectors")
    with pytest.raises(UserError, match=r"mine could not be measured: .*mat1 and mat2"):
        measure_costs("mine", broken, CPU, local_batch=2, split_dim=8, optimizer="thor")
