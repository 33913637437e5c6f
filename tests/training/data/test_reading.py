"""The worker processes themselves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_thor.training.data import BrokenImageError, EvaluationTransform, ImageTransform, Workers, raw_loader

CROP = EvaluationTransform(ImageTransform(size=8, resize=8))


class Telling:
    """Gives no images, but says in whose place and whether it minds Ctrl-C."""

    labels = torch.zeros(6, dtype=torch.int64)
    classes = ("a", "b")

    def load(self, index):
        raise BrokenImageError(f"{os.getpid()} {signal.getsignal(signal.SIGINT) == signal.SIG_IGN}")

    def where(self, index):
        return str(index)


def told(workers):
    keys = [[(0, 2 * batch), (0, 2 * batch + 1)] for batch in range(3)]
    loader = raw_loader(Telling(), CROP, keys, workers)
    batches = [batch for _ in range(2) for batch in loader]
    assert [[index for index, _ in batch.broken] for batch in batches] == [[0, 1], [2, 3], [4, 5]] * 2
    return {tuple(reason.split()) for batch in batches for _, reason in batch.broken}


@pytest.fixture
def waiting_handlers():
    """The training process waits for a good moment to stop, as it does under `torch-thor train`."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("waiting_handlers")
def test_workers_persist_and_leave_ctrl_c_to_the_training_process():
    answers = told(Workers(count=2))
    assert {answer[1] for answer in answers} == {"True"}
    assert len(answers) == 2  # over both epochs
    assert str(os.getpid()) not in {answer[0] for answer in answers}


@pytest.mark.usefixtures("waiting_handlers")
def test_without_workers_the_training_process_keeps_its_handler():
    assert told(Workers(count=0)) == {(str(os.getpid()), "False")}


ENDING = """
import signal
from torch_thor.training.data import Workers
import test_reading
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
loader = test_reading.raw_loader(test_reading.Telling(), test_reading.CROP, [[(0, 0)]] * 3, Workers(count=2))
left = iter(loader)
next(left)
"""


@pytest.mark.slow
def test_a_program_ends_quietly_with_its_workers_alive():
    # the interpreter ends the workers with SIGTERM, which neither a handler of ours may stop nor be an error
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", ENDING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
