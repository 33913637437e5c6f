"""`torch-thor`, which sends itself a signal in a given step: python signalled_script.py SIGNAL STEP RANKS WORDS.

A signal from outside needs a training so long that it is not over when the signal comes.
"""

import os
import signal
import sys

from torch_thor.cli import main
from torch_thor.training.engine.step import Stepper

if __name__ == "__main__":
    name, at, ranks, *sys.argv[1:] = sys.argv[1:]
    take = Stepper.take

    def signalled(stepper, batch, step):
        if step == int(at) and os.environ.get("RANK", "0") in ranks:
            os.kill(os.getpid(), signal.Signals[name])
        return take(stepper, batch, step)

    Stepper.take = signalled
    main()
