"""The benchmark of `torch-thor prepare`: synthetic dumps are as real ones, memory is that of all processes together."""

import bz2
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from torch_thor.training.text.documents import Document, read
from torch_thor.training.text.sources import find_sources, units

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HOLDER = "import sys; data = bytearray(40_000_000); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def small(opened, monkeypatch):
    module = opened("wikipedia_dump")
    monkeypatch.setattr(module, "FORMS", 50_000)
    return module


def test_dumps_have_articles_of_prose_and_more_words_the_longer_they_are(small, tmp_path):
    words = []
    for size in (50_000, 400_000):
        file = tmp_path / f"{size}.xml.bz2"
        written = small.write_dump(file, size)
        assert size <= written == len(bz2.decompress(file.read_bytes()))
        parts = list(units(find_sources([str(file)]), lambda path: path.open("rb")))
        found = [read(piece) for unit in parts for piece in unit.pieces]
        assert all(isinstance(one, Document) for one in found)
        assert not any(unit.faults for unit in parts)
        text = [paragraph for one in found for paragraph in one.paragraphs]
        assert not any(mark in line for line in text for mark in ("[[", "{{", "<ref", "==", "http"))
        assert 0.3 < sum(map(len, text)) / written < 0.7
        words.append(len(set(" ".join(text).lower().split())))
    assert words[1] > 2 * words[0]


def test_the_memory_of_a_process_and_of_those_that_it_starts_is_seen(opened):
    memory = opened("prepare_memory")
    with subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDER!r}])"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        tree = list(memory.process_tree(process.pid))
        sizes = [memory.proportional_set_size(one) for one in tree]
        process.stdin.close()
    assert len(tree) == 2
    assert sizes[1] > 40_000_000 > sizes[0] > 1_000_000
    assert memory.proportional_set_size(process.pid) == 0
