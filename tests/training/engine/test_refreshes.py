"""When the next refresh comes."""

import torch

from replaying import small_run
from torch_thor import THOR
from torch_thor.training import Callback, RunConfig, train
from torch_thor.training.engine.refreshes import steps_to_refresh


def test_steps_to_refresh():
    config = RunConfig(epochs=10, batch_size=12)  # an epoch is one step
    run = small_run(config, lambda model: THOR(model, lr=0.01, damping=0.1, update_interval=4))
    seen = []

    class Watch(Callback):
        def at_boundary(self, run):
            seen.append(steps_to_refresh(run.optimizer))

    assert steps_to_refresh(run.optimizer) == 0
    train(run, [Watch()])
    assert seen == [3, 2, 1, 0, 3, 2, 1, 0, 3, 2]  # steps 1, 5 and 9 refresh
    assert steps_to_refresh(torch.optim.SGD(run.model.parameters())) is None
    for layer in run.optimizer.curvature.values():
        layer.state["stopped"] = 1
    assert steps_to_refresh(run.optimizer) is None
