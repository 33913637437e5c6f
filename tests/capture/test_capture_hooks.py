"""The hooks that a step does not need are gone, and their absence changes no bit."""

import pytest

from tiny import assert_same, batches, listened_to, mlp, train, weights
from torch_thor import THOR
from torch_thor.capture import capture

STREAM = batches(10)


def stopping(model, *names):
    """THOR that stops the named layers at their second refresh, and takes all factors of the others."""
    groups = [
        {
            "params": list(model.get_submodule(name).parameters()),
            "trace_thresholds": (1e9, 1e8) if name in names else (0.0, 0.0),
        }
        for name in ("0", "2", "4")
    ]
    return THOR(groups, model=model, lr=0.1, update_interval=2)


@pytest.mark.parametrize("names", [("2",), ("0", "2"), ("0", "2", "4")])
def test_without_hooks_the_bits_are_the_same(names, monkeypatch):
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    train(model, stopping(model, *names), STREAM)
    assert len(listened_to(model)) < 3
    listen = capture.Capture.listen

    def hooks_everywhere(self):
        listen(self)
        capture.module_calls.listen(self, self._hooks)

    monkeypatch.setattr(capture.Capture, "listen", hooks_everywhere)
    other = stopping(twin, *names)
    train(twin, other, STREAM)
    assert listened_to(twin) == {"0", "2", "4"}  # else nothing was compared
    assert other.curvature["2"].stopped
    assert_same(weights(model), weights(twin))
