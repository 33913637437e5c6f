"""Lines with their spread, and pictures that are whole or not there."""

import statistics

import pytest
from matplotlib.figure import Figure
from PIL import Image

from torch_thor.bench.drawing import draw_band, save

SERIES = [[1.0, 2.0], [2.0, 3.0], [6.0, 10.0]]


def test_a_band_is_a_middle_and_the_range():
    axes = Figure().subplots()
    draw_band(axes, [0, 1], SERIES, label="mean", shade=0.5)
    draw_band(axes, [0, 1], SERIES, label="median", middle=statistics.median)
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[3.0, 5.0], [2.0, 3.0]]
    first, second = axes.collections
    assert {float(y) for _, y in first.get_paths()[0].vertices} == {1.0, 2.0, 6.0, 10.0}
    assert (first.get_alpha(), second.get_alpha()) == (0.5, 0.2)


def test_one_series_has_no_range():
    axes = Figure().subplots()
    draw_band(axes, [0, 1], SERIES[:1], label="one")
    assert not axes.collections


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
    path = tmp_path / "picture.png"
    figure = Figure(figsize=(1, 1))
    save(figure, path)
    with Image.open(path) as picture:
        picture.load()
    before = path.read_bytes()

    class Broken(Figure):
        def savefig(self, name, **options):
            name.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save(Broken(), path)
    assert path.read_bytes() == before
