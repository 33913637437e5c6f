"""How much of the code one training step goes through: a step must stay readable, and cheap in Python."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_thor
from torch_thor import THOR

PACKAGE = Path(torch_thor.__file__).parent
# counting comprehensions as functions, as Python 3.11 does
ORDINARY_FILES, ORDINARY_FUNCTIONS = 15, 66
REFRESH_FILES, REFRESH_FUNCTIONS = 26, 156
INTERVAL = 5


def passed(train):
    """Files and functions of the package that a call goes through."""
    seen = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            seen.add((Path(code.co_filename).relative_to(PACKAGE), code.co_qualname, code.co_firstlineno))

    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
    return {file for file, *_ in seen}, seen


@pytest.mark.parametrize(
    "options", [{}, {"scaling": "spectral"}, {"weight_decay": 0.1}], ids=["own", "spectral", "decay"]
)
def test_a_step_passes_few_files_and_functions(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    optimizer = THOR(model, update_interval=INTERVAL, trace_thresholds=(0.0, 0.0), **options)

    def train():
        x, y = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))  # fresh ones: else the trace of A does not change
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(INTERVAL):
        train()
    files, refresh = passed(train)
    assert [event.decision.name for event in optimizer.last_refresh] == ["UPDATE", "UPDATE"]
    assert len(files) <= REFRESH_FILES, sorted(map(str, files))
    assert len(refresh) <= REFRESH_FUNCTIONS, sorted(name for _, name, _ in refresh)
    train()
    files, ordinary = passed(train)
    assert not optimizer.last_refresh
    assert len(files) <= ORDINARY_FILES, sorted(map(str, files))
    assert len(ordinary) <= ORDINARY_FUNCTIONS, sorted(name for _, name, _ in ordinary)
    assert len(refresh) > 2 * len(ordinary)


def test_the_optimizer_can_be_read():
    lines = Path(inspect.getfile(THOR)).read_text().splitlines()
    assert len(lines) <= 300
    step = inspect.getsource(inspect.unwrap(THOR.step))
    body = step.split('"""')[2].strip().splitlines()
    assert len(body) <= 25
