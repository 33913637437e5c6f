"""FSDP2: two processes take the steps of one, and a saved run goes on with others."""

from pathlib import Path

import pytest
import torch

from command_line import command

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp2.py"
SMALL = ("--width", 16, "--length", 16, "--batch", 8)


def losses(folder, ranks, *words):
    code, out, err = command(folder, *SMALL, *words, ranks=ranks, script=SCRIPT)
    assert code == 0, err
    lines = [line.split(": loss ") for line in out.splitlines() if line.startswith("step ")]
    return {step: float(loss) for step, loss in lines}


def test_what_is_missing_is_one_line(tmp_path):
    code, _, err = command(tmp_path, script=SCRIPT)
    assert (code, err) == (1, "start it with torchrun --nproc-per-node 2 examples/fsdp2.py\n")
    code, _, err = command(tmp_path, "--data", "absent.txt", script=SCRIPT)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("no absent.txt: give a text with --data, or leave it out (")


@pytest.mark.parametrize("optimizer", ["adamw", "thor-muon", "thor"])
def test_two_processes_equal_one(tmp_path, optimizer):
    one, two = (losses(tmp_path, n, "--optimizer", optimizer, "--steps", 40) for n in (1, 2))
    assert [*one] == ["step 20", "step 40"]
    # THOR cuts its blocks where the parts end, so it takes other steps on two
    assert two == pytest.approx(one, rel=0.05 if optimizer == "thor" else 1e-4)
    assert one["step 40"] < one["step 20"] < torch.tensor(256.0).log()


def test_a_saved_run_goes_on_with_another_number_of_processes(tmp_path):
    whole = losses(tmp_path, 2, "--steps", 40)
    first = losses(tmp_path, 2, "--steps", 20, "--out", tmp_path / "saved")
    assert first["step 20"] == whole["step 20"]
    assert (tmp_path / "saved" / ".metadata").exists()
    then = losses(tmp_path, 1, "--steps", 40, "--out", tmp_path / "saved")
    assert then == pytest.approx({"step 40": whole["step 40"]}, rel=1e-3)
