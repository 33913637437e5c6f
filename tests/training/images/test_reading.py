"""The worker processes themselves."""

import os
import signal

import pytest
import torch

from torch_thor.training.images.decoding import BrokenImageError
from torch_thor.training.images.reading import Workers, raw_loader
from torch_thor.training.images.transforms import EvaluationTransform, ImageTransform

CROP = EvaluationTransform(ImageTransform(size=8, resize=8))


class Telling:
    """Gives no images, but says in whose place and with which signal handlers it was asked."""

    labels = torch.zeros(6, dtype=torch.int64)
    classes = ("a", "b")

    def load(self, index):
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        raise BrokenImageError(f"{os.getpid()} {handlers == [signal.SIG_IGN, signal.SIG_DFL]}")

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
def test_workers_persist_and_end_when_told_to():
    answers = told(Workers(count=2))
    assert {answer[1] for answer in answers} == {"True"}
    assert len(answers) == 2  # over both epochs
    assert str(os.getpid()) not in {answer[0] for answer in answers}


@pytest.mark.usefixtures("waiting_handlers")
def test_without_workers_the_training_process_keeps_its_handlers():
    assert told(Workers(count=0)) == {(str(os.getpid()), "False")}
