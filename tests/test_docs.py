"""The Python examples of README, tutorial, how-to guides and explanation run as printed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

import torch_thor

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted(path for part in ("tutorial", "how-to", "explanation") for path in (ROOT / "docs" / part).glob("*.md")),
]
NOT_RUN = {
    "ddp.md",
    "fsdp.md",
    "compile.md",
}  # processes and compilation take long: tests/distributed and test_compile have them
IS_ONE_PROGRAM = {"your-own-loop.md", "register-kind.md"}  # later examples of these pages continue the earlier ones


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv1(x)))


class Classifier(nn.Module):
    """A network that has the layer names of the examples."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(Block())
        self.last = nn.ModuleDict({"attn": nn.Linear(4 * 36, 16)})
        self.lm_head = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.lm_head(F.relu(self.last["attn"](self.layer1(x).flatten(1)))))


def surroundings(page):
    """What the examples of a page take as given: a model, data, and the usual imports."""
    torch.manual_seed(0)
    model = Classifier()
    loader = [(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))) for _ in range(2)]
    if page.name == "padding.md":  # tokens, targets, attention mask
        model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
        tokens = torch.randint(20, (4, 6))
        loader = [(tokens, tokens, torch.ones(4, 6))]
    given = {"torch": torch, "nn": nn, "F": F, "Normal": Normal, "model": model, "loader": loader}
    given |= {
        "THOR": torch_thor.THOR,
        "ThorMuon": torch_thor.ThorMuon,
        "AGCSGD": torch_thor.AGCSGD,
        "adaptive_clip_grad_": torch_thor.adaptive_clip_grad_,
    }
    given |= {"loss_fn": F.cross_entropy, "optimizer": torch_thor.THOR(model)}
    given |= {"x": loader[0][0], "y": loader[0][1], "images": loader[0][0], "labels": loader[0][1]}
    given |= {"targets": loader[0][1], "device": "cpu", "epochs": 2, "epoch": 1, "steps": 4}
    if isinstance(model, Classifier):
        given |= {"backbone": model.layer1, "head": model.head}
        F.cross_entropy(model(given["x"]), given["y"]).backward()
        given["optimizer"].step()
    return given


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page) and page.name not in NOT_RUN], ids=lambda page: page.stem
)
def test_examples_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    registered = torch_thor.curvature.kinds.registry.KINDS  # without those of examples afterwards
    monkeypatch.setattr(registered, "classes", dict(registered.classes))
    given = surroundings(page)
    for example in examples(page):
        exec(compile(example, str(page), "exec"), given)
        if page.name not in IS_ONE_PROGRAM:
            given = surroundings(page)


def test_the_coverage_tables_are_those_of_the_program(capsys):
    program = next(example for example in examples(ROOT / "docs/tutorial/your-own-loop.md") if "load_digits" in example)
    exec(program.partition("for epoch in")[0], {})
    table = capsys.readouterr().out.partition("\n)\n")[2].strip()
    assert "0.weight" in table
    for page in ("tutorial/your-own-loop.md", "how-to/messages.md"):
        assert table in (ROOT / "docs" / page).read_text()
