"""What can be seen in the picture of a run's curves."""

import math
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from torch_thor.training.curves import draw_curves, label_in_full, legend_below, marker
from torch_thor.training.tasks.task import Metric

LOSS = Metric("loss", "loss", "held-out loss", higher_is_better=False, primary=True)


def result(name, steps, evaluations, *, step=1, averaged=False):
    """Curves that fall from 2; an evaluation has a loss, and perhaps that of averaged weights."""
    curve = [(step * i, i / 2, 2 * 0.99**i) for i in range(1, steps + 1)]
    found = [{"step": i, "seconds": i / 2, "loss": 2.0 / i} for i in range(1, evaluations + 1)]
    if averaged:
        found = [{**at, "averaged_loss": at["loss"] / 2} for at in found]
    return SimpleNamespace(name=name, metric=LOSS, curve=curve, evaluations=found)


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draw results: the figure, laid out as it is saved."""
    drawn = []

    def keep(figure, path, **_):
        drawn.append(figure)
        path.touch()

    def figure_of(*results):
        draw_curves(results, tmp_path / "curves.png")
        drawn[-1].draw_without_rendering()
        return drawn[-1]

    monkeypatch.setattr(Figure, "savefig", keep)
    return figure_of


def labels(axis):
    texts = [axis.get_ticklabels(minor=minor) for minor in (False, True)]
    return [label.get_text() for own in texts for label in own if label.get_text()]


@pytest.mark.parametrize(("points", "shown"), [(1, "."), (19, "."), (20, ""), (500, "")])
def test_points_are_marked_if_they_are_fewer_than_twenty(draw, points, shown):
    assert marker(range(points)) == shown
    figure = draw(result("one", points, 7), result("two", 7, points))
    markers = [[line.get_marker() for line in axes.get_lines()] for axes in figure.axes]
    assert markers == [[shown, "."]] * 2 + [[".", shown]] * 2


def test_the_legend_names_each_curve_once_and_covers_nothing(draw):
    figure = draw(*(result(f"optimizer {i}", 30, 5, averaged=i == 3) for i in range(7)))
    (legend,) = figure.legends
    assert all(axes.get_legend() is None for axes in figure.axes)
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*(f"optimizer {i}" for i in range(7)), "optimizer 3, averaged weights"]
    around = legend.get_window_extent()
    assert not any(around.overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert figure.bbox.containsx(around.x0)
    assert figure.bbox.containsx(around.x1)


def test_an_optimizer_has_one_colour_in_all_pictures(draw):
    figure = draw(result("one", 30, 5, averaged=True), result("two", 30, 5, averaged=True))
    losses, _, metrics, _ = ([line.get_color() for line in own.get_lines()] for own in figure.axes)
    assert metrics == [losses[0], losses[0], losses[1], losses[1]]
    assert losses[0] != losses[1]


def test_numbers_at_ticks_are_written_in_full(draw):
    figure = draw(result("one", 2000, 5, step=1000))  # to 4e-9 in 2 million steps
    loss, _, metric, _ = figure.axes
    assert {"1", "0.01", "0.0001", "0.00000001"} <= set(labels(loss.yaxis))
    assert {"0.4", "1.0", "2.0"} <= set(labels(metric.yaxis))
    assert "1000000" in labels(metric.xaxis)
    assert metric.xaxis.get_offset_text().get_text() == ""
    assert metric.get_ylabel() == "held-out loss"


def test_part_of_a_decade_has_labels_and_a_far_range_no_offset():
    figure = Figure()
    part, far = figure.subplots(1, 2)
    part.plot([1, 2], [0.2, 0.9])
    part.set_yscale("log")
    far.plot([1, 2], [1_000_000.1, 1_000_000.3])
    for axes in (part, far):
        label_in_full(axes)
    figure.draw_without_rendering()
    numbers = [float(label) for label in labels(part.yaxis)]
    assert len([one for one in numbers if 0.2 <= one <= 0.9]) >= 2
    assert all(math.isclose(10 * one, round(10 * one)) for one in numbers)
    assert not {0.8, 0.9} & set(numbers)  # which would overlap
    assert far.yaxis.get_offset_text().get_text() == ""
    assert "1000000.100" in labels(far.yaxis)


def test_the_first_curve_of_a_name_is_the_one_in_the_legend():
    figure = Figure(layout="constrained")
    panels = figure.subplots(1, 2)
    first, second = (panel.plot([1, 2], [1, 2], label="same")[0] for panel in panels)
    first.set_marker(".")
    legend_below(figure, panels)
    (handle,) = figure.legends[0].legend_handles
    assert (handle.get_marker(), second.get_marker()) == (".", "None")
