"""Train the task of noisy.py as a command would: `python run_script.py PLAN OUT WORDS`.

PLAN has a part for each start under `torchrun`, separated by commas: `1:step:5:SIGKILL` sends rank
1 this signal before the optimizer's step 5, `0:writing:6:SIGKILL` before the manifest of a
checkpoint, `0:evaluation:6:SIGKILL` before an evaluation, and `0:claim:0:SIGKILL` before the folder
is changed. WORDS may be --resume.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from rich.console import Console

sys.path.append(str(Path(__file__).parent))

import noisy

from torch_thor.errors import StoppedError, UserError
from torch_thor.training import checkpoint, loop, run
from torch_thor.training.folder import RunFolder
from torch_thor.training.precision import Precision


def main(plan, out, *words):
    torch.set_num_threads(1)
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    parts = [part.split(":") for part in plan.split(",")]
    rank, *planned, action = parts[start] if start < len(parts) else ("", "", "", "")
    now = [0]  # the present step, or the latest step

    def at(moment, number):
        if (os.environ.get("RANK", "0"), moment, str(number)) == (rank, *planned):
            os.kill(os.getpid(), signal.Signals[action])

    def before(owner, name, moment, steps=0):
        really = getattr(owner, name)

        def called(*given, **options):
            now[0] += steps
            at(moment, now[0])
            return really(*given, **options)

        setattr(owner, name, called)

    before(Precision, "step", "step", steps=1)
    before(checkpoint, "to_yaml", "writing")
    before(loop, "evaluate", "evaluation")
    before(RunFolder, "begin", "claim")
    begin = loop.train

    def train(trained, *given, **options):
        now[0] = trained.step
        begin(trained, *given, **options)

    run.train, run.open_task = train, lambda *_, **options: noisy.Noisy()
    recipe = noisy.recipe(name="noisy", optimizer=("thor", "sgd"))
    try:
        folder = RunFolder(Path(out))
        resume = "--resume" in words or folder.is_restarted
        run.run_recipe(recipe, folder, Console(width=200), resume=resume)
    except (UserError, StoppedError) as error:
        print(f"torch-thor, start {start}: {error}", file=sys.stderr)
        sys.exit(2)


def main_in(folder, *words):
    """The same in a folder, as a function of a process that may have been forked."""
    os.chdir(folder)
    main(*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
