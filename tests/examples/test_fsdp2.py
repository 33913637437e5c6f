"""FSDP2: two processes take the same steps as a single process, and a saved run goes on."""

import re
from pathlib import Path

import pytest
import torch

from command_line import command

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp2.py"
SMALL = ("--width", 16, "--length", 16, "--batch", 8)


def losses(folder, ranks, *words, optimizer="thor-muon"):
    words = (*SMALL, *words, "--optimizer", optimizer)
    code, out, err = command(folder, *words, ranks=ranks, script=SCRIPT)
    assert code == 0, err
    what, *lines, last = out.splitlines()
    assert what.endswith(f"steps on {ranks} x cpu")
    found = {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (.*)", out)}
    assert len(lines) == len(found)
    assert last == f"{optimizer:10} loss {[*found.values()][-1]:.5f}"
    return found


def test_what_is_missing_is_one_line(tmp_path):
    code, _, err = command(tmp_path, script=SCRIPT)
    assert (code, err) == (1, "start it with torchrun --nproc-per-node 2 examples/fsdp2.py\n")
    code, _, err = command(tmp_path, "--data", "absent.txt", script=SCRIPT)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("no absent.txt: give a text with --data, or leave it out (")


@pytest.mark.parametrize("optimizer", ["adamw", "thor-muon", "thor"])
def test_two_processes_equal_one(tmp_path, optimizer):
    single, two = (losses(tmp_path, n, "--steps", 40, optimizer=optimizer) for n in (1, 2))
    assert [*single] == [20, 40]
    # THOR cuts its blocks where the parts end, so it takes other steps on two processes
    assert two == pytest.approx(single, rel=0.05 if optimizer == "thor" else 1e-4)
    assert single[40] < single[20] < torch.tensor(256.0).log()


def test_a_saved_run_goes_on_with_another_number_of_processes(tmp_path):
    whole = losses(tmp_path, 2, "--steps", 40)
    first = losses(tmp_path, 2, "--steps", 20, "--out", tmp_path / "saved")
    assert first[20] == whole[20]
    assert (tmp_path / "saved" / "thor-muon" / ".metadata").exists()
    then = losses(tmp_path, 1, "--steps", 40, "--out", tmp_path / "saved")
    assert then == pytest.approx({40: whole[40]}, rel=1e-3)
