"""The picture of all refreshes: what each layer decided, and for how long it held."""

import pytest
from matplotlib.figure import Figure

from torch_thor.training import History, RefreshPoint, StepPoint
from torch_thor.training.reports import draw_refreshes
from torch_thor.training.reports.refresh_plot import COLOURS


def test_picture_shows_every_decision_where_it_held(tmp_path, monkeypatch):
    steps = [StepPoint(step, 1.0, 0.1, 0.0, 0.0, refresh=False) for step in range(1, 11)]
    refreshes = [
        RefreshPoint(1, "a", "update", None, 4.0), RefreshPoint(1, "b", "failed", None, None),
        RefreshPoint(3, "b", "update", None, 9.0), RefreshPoint(5, "a", "keep", 0.1, 5.0),
        RefreshPoint(7, "a", "stop", 0.0, 5.5),
    ]  # fmt: skip
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (drawn.append(self), path.touch()))
    draw_refreshes(History(steps, refreshes=refreshes), ["a", "b", "never"], tmp_path / "refreshes.png")
    assert [path.name for path in tmp_path.iterdir()] == ["refreshes.png"]
    rows, traces = drawn[0].axes
    spans = []
    for collection in rows.collections:
        for path, colour in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
            left, bottom = path.vertices.min(0)
            right, top = path.vertices.max(0)
            spans.append((left, right, round((bottom + top) / 2), tuple(colour)))

    def colour(decision):
        return (*(int(COLOURS[decision][i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)

    assert spans == [
        (1, 5, 0, colour("update")), (5, 7, 0, colour("keep")), (7, 11, 0, colour("stop")),
        (1, 3, 1, colour("failed")), (3, 11, 1, colour("update")),
    ]  # fmt: skip
    assert [label.get_text() for label in rows.get_yticklabels()] == ["a", "b", "never"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in traces.get_lines()}
    assert lines == {"a": [[1, 4.0], [5, 5.0], [7, 5.5]], "b": [[3, 9.0]], "never": []}
    assert traces.get_yscale() == "log"


@pytest.mark.pictures
def test_picture_of_very_many_layers(tmp_path):
    """No names that nobody can read, and a size that a screen takes."""
    layers = [f"layer{i}" for i in range(200)]
    refreshes = [RefreshPoint(1, layer, "update", None, 1.0 + i) for i, layer in enumerate(layers)]
    draw_refreshes(
        History([StepPoint(1, 1.0, 0.1, 0.0, 0.0, refresh=True)], refreshes=refreshes), layers, tmp_path / "r.png"
    )
    width, height = (int.from_bytes((tmp_path / "r.png").read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert max(width, height) < 2000


@pytest.mark.pictures
@pytest.mark.parametrize("trace", [None, 0.0])
def test_a_training_without_a_positive_trace_is_drawn(tmp_path, trace):
    """With a loss scale that overflows in each step, all of them are skipped."""
    refreshes = [] if trace is None else [RefreshPoint(1, "a", "update", None, trace)]
    steps = [StepPoint(step, 1.0, 0.1, 0.0, 0.0, refresh=True) for step in range(1, 4)]
    draw_refreshes(History(steps, refreshes=refreshes), ["a"], tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 0
