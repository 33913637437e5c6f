"""Predicted times, against those computed by hand."""

from types import SimpleNamespace

import pytest
from torch import nn

from torch_thor import THOR
from torch_thor.training import UserError
from torch_thor.training.reports.plan_times import (
    BUCKET,
    Costs,
    Workload,
    blocks_of,
    collectives_of_refresh,
    parameter_collectives,
    predict,
    refresh_seconds,
)

FREE = SimpleNamespace(seconds=lambda one, processes: 0.0)
SLOW = SimpleNamespace(seconds=lambda one, processes: one.sent(processes) / 100)


def line(fixed, each):
    return SimpleNamespace(at=lambda samples: fixed + each * samples)


def costs(**others):
    values = {
        "model": "",
        "split_dim": 4,
        "optimizer": "thor",
        "sample": "",
        "local_batch": 4,
        "forward_backward": line(1.0, 2.0),
        "step": 8.0,
        "refresh": line(10.0, 1.0),
        "inversion": (SimpleNamespace(size=4, first=100.0, each=100.0),),
        "pack": 0.0,
        "unpack": 0.0,
        "machine": {},
        "seconds": {},
    }
    return Costs(**{**values, **others})


def layers():
    """Eight blocks of 4 rows, four of A and four of G."""
    return list(THOR(nn.Linear(16, 16, bias=False), split_dim=4).curvature.values())


def test_one_process():
    found = predict(layers(), 1024, 1, costs(), SLOW, Workload(4, 10, 40))
    assert found.ordinary == 9 + 8
    assert found.refresh == 17 + 14 + 800
    assert (found.ordinary_sending, found.refresh_sending) == (0, 0)
    assert found.epoch == 9 * 17 + 831


def test_several_processes_divide_samples_and_inversions():
    found = predict(layers(), 1024, 4, costs(), FREE, Workload(9, 10))
    assert found.local_batch == 3
    assert found.ordinary == pytest.approx(7 + 8)
    assert found.refresh == pytest.approx(15 + 13 + 200)
    assert found.epoch is None
    sharded = predict(layers(), 1024, 4, costs(), FREE, Workload(9, 10), sharded=True)
    assert sharded.ordinary == pytest.approx(7 + 2)
    copied = predict(layers(), 1024, 4, costs(copy=0.5), FREE, Workload(9, 10), sharded=True)
    assert copied.ordinary == pytest.approx(7 + 2 + 3 * 1024 * 0.5)


def test_the_network():
    given = layers()
    found = predict(given, 1000, 2, costs(), SLOW, Workload(2, 1))
    sent = sum(one.sent(2) for one in collectives_of_refresh(given, 2))
    assert found.ordinary_sending == pytest.approx(1000 / 100)
    assert found.refresh_sending == pytest.approx(10 + sent / 100)
    assert found.refresh - found.refresh_sending == pytest.approx(3 + 8 + 11 + 400)


def test_packing():
    """Eight triangles of 10 elements; on two processes each owns four."""
    blocks = blocks_of(layers())
    assert refresh_seconds(blocks, 1, costs(pack=1.0, unpack=1.0)) == 800
    assert refresh_seconds(blocks, 2, costs(pack=1.0)) == 400 + 80 + 2 * 40
    assert refresh_seconds(blocks, 2, costs(unpack=1.0)) == 400 + 40 + 2 * 80
    # packed sums, own sums, packed results and inverses, of float32
    assert refresh_seconds(blocks, 2, costs(copy=1.0)) == 400 + 4 * (80 + 40 + 2 * (40 + 80) + 8 * 16)


def test_collectives_of_every_step():
    all_reduce, rest = parameter_collectives(BUCKET + 400, 4, sharded=False)
    assert (all_reduce.name, all_reduce.given, rest.given) == ("all_reduce", BUCKET, 400)
    names = [(one.name, one.sent(4)) for one in parameter_collectives(400, 4, sharded=True)]
    assert names == [("all_gather_into_tensor", 300)] * 2 + [("reduce_scatter_tensor", 300)]
    assert parameter_collectives(400, 1, sharded=True) == []


def test_more_processes_than_samples_get_one_line():
    with pytest.raises(UserError, match="--batch=4: 8 processes need at least as many samples"):
        Workload(4, 1).local(8)
