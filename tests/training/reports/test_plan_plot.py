"""The plot of predicted times."""

import pytest

from torch_thor.training.reports.plan_plot import DDP, FSDP, Times, base_of, draw_times, relative


def times(form, *counts, epoch=None):
    return [Times(form, n, 64 // n, 16 / n, 0, 32 / n, 0, epoch and epoch / n) for n in counts]


def test_relative_to_eight_processes_or_to_the_fewest():
    assert base_of(times(DDP, 1, 8, 64)) == 8
    assert base_of(times(DDP, 4, 64)) == 4
    assert relative(times(DDP, 1, 8, 64)) == [8, 1, 0.125]
    assert relative(times(DDP, 4, 16, epoch=100)) == [1, 0.25]


@pytest.mark.parametrize("word", ["resnet50", "bert-tiny"])
def test_a_picture_is_written(tmp_path, word):
    draw_times(word, times(DDP, 1, 8) + times(FSDP, 1, 8), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size
