"""`torch-thor`, of which one rank kills itself in each start but the last: python killed_script.py KILLS WORDS.

KILLS are separated by commas, such as `2:step:5` (rank 2, in an ordinary or refresh step 5), `0:checkpoint:12` (before
the checkpoint of step 12 is written), `3:writing:12` (when it has written its part of that, and nobody the manifest),
`1:evaluation:9`, `1:claim:0` (before the run folder is changed), and `1:error:5` (an error of the user instead of a
kill); `none` kills nobody. Without `torchrun` there is one start, of rank 0.
"""

import os
import signal
import sys

from torch_thor.cli import main
from torch_thor.training import UserError
from torch_thor.training.checkpoints import checkpoint, divided, saving
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
    write, seal = divided.write_parts, checkpoint.write_manifest

    def stepped(precision, optimizer):
        end("step", steps[0].step + 1)
        if ("error", steps[0].step + 1) == KILLED:
            raise UserError("this rank cannot go on")
        return step(precision, optimizer)

    def written(*words):
        write(*words)
        end("writing", steps[0].step)

    def sealed(*words, **options):
        end("writing", steps[0].step)
        return seal(*words, **options)

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
    divided.write_parts, checkpoint.write_manifest = written, sealed
    import torch_thor.training.experiment as experiment

    begin = experiment._begin

    def begun(*words, **options):
        end("claim", 0)
        return begin(*words, **options)

    experiment.train, experiment._begin = trained, begun


if __name__ == "__main__":
    kills, *sys.argv[1:] = sys.argv[1:]
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    planned = kills.split(",")
    if start < len(planned) and kills != "none":
        rank, moment, at = planned[start].split(":")
        if rank == os.environ.get("RANK", "0"):
            KILLED = (moment, int(at))
    watch()
    main()
