"""How much of the code one training step goes through: a step must stay readable, and cheap in
Python.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_thor
from tiny import leave_no_listeners
from torch_thor import THOR, ThorMuon

PACKAGE = Path(torch_thor.__file__).parent
# Files and functions that a step passes, with its forward and backward pass: an ordinary one, and
# one that refreshes.
ORDINARY, REFRESH = (11, 50), (18, 120)
INTERVAL = 5


def assert_passes(train, most_files, most_functions):
    """Of the package, a call goes through so many files and functions at most; returns the number
    of functions.
    """
    seen = set()

    def note(frame, event, _):
        code = frame.f_code
        # Python 3.11 calls comprehensions
        if (
            event == "call"
            and code.co_filename.startswith(str(PACKAGE))
            and not code.co_name.endswith(("comp>", "expr>"))
        ):
            seen.add(
                (
                    str(Path(code.co_filename).relative_to(PACKAGE)),
                    code.co_qualname,
                    code.co_firstlineno,
                )
            )

    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
    files = {file for file, *_ in seen}
    assert len(files) <= most_files, sorted(files)
    assert len(seen) <= most_functions, sorted(seen)
    return len(seen)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=["", "decay"])
@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
def test_a_step_passes_few_files_and_functions(optimizer, options):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
    one = optimizer(model, update_interval=INTERVAL, **options)

    def train():
        # fresh ones: else the trace of A does not change
        x, y = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
        one.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        one.step()

    for _ in range(INTERVAL):
        train()
    leave_no_listeners(one)  # global hooks of other tests' optimizers would be counted
    count = assert_passes(train, *REFRESH)
    assert [event.decision.name for event in one.last_refresh] == ["UPDATE", "UPDATE"]
    train()
    assert 2 * assert_passes(train, *ORDINARY) < count
    assert not one.last_refresh
