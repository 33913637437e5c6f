"""split_dim="auto" on several ranks: the first one measures, or finds, a number for all of them."""

import contextlib
import os
import pathlib
import warnings
from unittest import mock

import torch
from torch import nn

from joined import alone, assert_same_training, digest, parallel, stream
from made_up_times import made_up_times

OPTIONS = {"trace_thresholds": (0.0, 0.0)}


def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 5)).double()


@contextlib.contextmanager
def measuring(folder, rank, seconds):
    """A cache of the rank's own, as on another machine, and times (to invert blocks up to 16) that it measures."""
    asked = []

    def measured(sizes, split_dims, **_):
        if seconds is None:
            raise torch.OutOfMemoryError("out of memory")
        asked.append(tuple(split_dims))
        return tuple(0.1 if size == 1 else seconds if size <= 16 else 100.0 for size in split_dims)

    here = {"TORCH_THOR_CACHE": f"{folder}/{rank}"}
    with mock.patch.dict(os.environ, here), made_up_times(measured):
        yield asked


def images(count):
    return [(pixels, labels) for (pixels, _), labels in stream(count)]


def run_once(rank, world, **options):
    def mine(batch):
        return batch[0][rank::world], batch[1][rank::world]

    model, optimizer = parallel(rank, world, make, **OPTIONS, **options)
    _train(model, optimizer, [mine(b) for b in images(5)])
    return model, optimizer


def _train(model, optimizer, batches):
    for x, labels in batches:
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def choose(rank, world, folder):
    with measuring(folder, rank, 0.2) as asked:
        model, optimizer = run_once(rank, world, split_dim="auto")
        chosen = optimizer.param_groups[0]["split_dim"]
        assert len(asked) == (1 if rank == 0 else 0), "every rank measures"
        assert pathlib.Path(f"{folder}/{rank}").is_dir() == (rank == 0), "every rank writes"
        given, its_optimizer = run_once(rank, world, split_dim=chosen)
        assert_same_training((model, optimizer, []), (given.module, its_optimizer, []))
        twin, single_optimizer = alone(make, **OPTIONS, split_dim=chosen)
        _train(twin, single_optimizer, images(5))
        assert_same_training((model, optimizer, []), (twin, single_optimizer, []))
        # the next training: found by the first rank alone, taken by all, with nothing measured
        again, found_optimizer = run_once(rank, world, split_dim="auto")
        assert found_optimizer.param_groups[0]["split_dim"] == chosen
        assert len(asked) == (1 if rank == 0 else 0)
        assert_same_training((again, found_optimizer, []), (twin, single_optimizer, []))
    return chosen, digest(model, optimizer)


def test_the_first_rank_measures_for_all(run, tmp_path):
    left, right = run(2, choose, str(tmp_path))
    assert left == right
    assert left[0] in {16, 32}


def fall_back(rank, world, folder):
    with measuring(folder, rank, None), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, optimizer = run_once(rank, world, split_dim="auto")
    return optimizer.param_groups[0]["split_dim"], [str(w.message) for w in caught if "auto" in str(w.message)]


def test_one_warning_where_nothing_can_be_measured(run, tmp_path):
    (first, told), (second, untold) = run(2, fall_back, str(tmp_path))
    assert first == second == 128
    assert len(told) == 1
    assert "out of memory" in told[0]
    assert not untold
