"""The samples that costs are measured with."""

import pytest
import torch

from torch_thor.training import UserError
from torch_thor.training.reports.plan_sample import make_sample

CPU = torch.device("cpu")
MODEL = """
import torch
from torch import nn

def model():
    return nn.Linear(5, 3)

def alone():
    return model()

def classes():
    return model(), (torch.randn(4, 5), torch.randint(3, (4,)))

def own_loss():
    return model(), ({"input": torch.randn(4, 5)}, torch.zeros(4, 3)), nn.functional.mse_loss

def one_tensor():
    return model(), torch.randn(4, 5)
"""


@pytest.fixture
def word(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return lambda function: f"{tmp_path / 'mine.py'}:{function}"


def sample(word, **options):
    return make_sample(word, CPU, **{"count": 2, "pixels": 64, "length": 16, **options})


@pytest.mark.parametrize(("name", "words"), [("resnet18", "64 pixels"), ("bert-tiny", "16 random tokens")])
def test_models_by_name(name, words):
    found = sample(name)
    assert words in found.description
    for samples in (1, 2):
        found.loss(samples).backward()
    assert all(p.grad is not None for p in found.model.parameters())


@pytest.mark.parametrize("function", ["classes", "own_loss"])
def test_models_of_a_file(word, function):
    loss = sample(word(function)).loss
    assert loss(1).item() != loss(2).item()
    loss(2).backward()


@pytest.mark.parametrize(
    ("function", "count", "told"),
    [
        ("alone", 2, "returned a model alone, and its times are to be measured: return"),
        ("classes", 5, "returned 4 samples: return at least 5, or give a smaller --local-batch"),
        ("one_tensor", 2, "returned a sample batch of type Tensor: return .inputs, targets"),
    ],
)
def test_bad_input_gets_one_line(word, function, count, told):
    with pytest.raises(UserError, match=told):
        sample(word(function), count=count)
