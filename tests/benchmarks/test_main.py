"""`python -m benchmarks`: what there is, and who gets the words."""

import builtins
import sys
from types import SimpleNamespace

from benchmarks import __main__ as program
from benchmarks.runner import study
from command_line import assert_refused

NAMES = [
    "ablation", "anytime", "finetuning", "front", "gpu", "nanogpt", "peers", "step_time", "suite",
]  # fmt: skip


def test_each_is_listed_with_one_line(bench):
    code, out, err = bench("--help")
    assert (code, err) == (0, "")
    lines = out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(line.split()) > 5 for line in lines)


def test_the_other_words_are_those_of_the_benchmark(bench, monkeypatch):
    got = []
    with_main = SimpleNamespace(main=lambda: got.append(sys.argv[1:]))
    for module in (with_main, SimpleNamespace(jobs=None)):
        monkeypatch.setattr(program, "import_module", lambda name, module=module: module)
        monkeypatch.setattr(study, "main", lambda own: got.append((own, sys.argv[1:])))
        assert bench("suite", "--table") == (0, "", "")
    assert got == [["--table"], (module, ["--table"])]


def test_what_cannot_be_run_is_one_line(bench, monkeypatch):
    said = "suit: there is no such benchmark (did you mean suite?); give one of ablation, anytime"
    assert_refused(bench("suit"), said, by="benchmarks")
    real = builtins.__import__

    def without_torchvision(name, *words):
        if name == "torchvision":
            raise ModuleNotFoundError(name=name)
        return real(name, *words)

    monkeypatch.delitem(sys.modules, "benchmarks.step_time", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_torchvision)
    assert_refused(bench("step_time"), "torchvision is missing: `pip install", by="benchmarks")


def test_an_interruption_is_one_line(bench, monkeypatch):
    def stopped(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "import_module", stopped)
    assert bench("suite") == (130, "", "benchmarks: stopped by Ctrl-C; the same command goes on\n")
