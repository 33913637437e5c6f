"""`torch-thor`, of which one rank kills itself in each start but the last: python killed_script.py KILLS WORDS.

KILLS are separated by commas, such as `2:step:5` (rank 2, in an ordinary or refresh step 5), `0:checkpoint:12` (when
the checkpoint of step 12 is written) and `1:evaluation:9`.
"""

import os
import signal
import sys

from torch_thor.cli import main
from torch_thor.training.checkpoints import saving
from torch_thor.training.engine import loop
from torch_thor.training.engine.precision import Precision

KILLED = None  # (moment, step) of this start, on the rank that is killed


def end(moment, step):
    """Kill this process without a chance to do anything, if it is the moment."""
    if (moment, step) == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def watch():
    """Let the moments of a training call `end`: before the optimizer's step, and where all processes communicate."""
    steps = [None]
    step, capture, evaluate, train = Precision.step, saving.capture_state, loop.evaluate, loop.train

    def stepped(precision, optimizer):
        end("step", steps[0].step + 1)
        return step(precision, optimizer)

    def captured(run):
        end("checkpoint", run.step)
        return capture(run)

    def evaluated(*words):
        end("evaluation", steps[0].step)
        return evaluate(*words)

    class Watch(loop.Callback):
        def before_training(self, run):
            steps[0] = run

    def trained(run, callbacks=()):
        return train(run, [Watch(), *callbacks])

    Precision.step, saving.capture_state, loop.evaluate = stepped, captured, evaluated
    import torch_thor.training.experiment as experiment

    experiment.train = trained


if __name__ == "__main__":
    kills, *sys.argv[1:] = sys.argv[1:]
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    planned = kills.split(",")
    if start < len(planned):
        rank, moment, at = planned[start].split(":")
        if rank == os.environ["RANK"]:
            KILLED = (moment, int(at))
    watch()
    main()
