"""Runs that are killed or stopped and started again end as a run that was never stopped."""

import signal

import pytest
import run_script
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

import warm
from command_line import checkpoints, command, lines
from tiny import assert_same

NOTHING = "0:never:0:"


def go(place, plan, out, *words, ranks=None):
    return command(place, plan, out, *words, ranks=ranks, script=run_script.__file__)


def outcome(run):
    """Everything that a finished run has written, except times."""
    found = {name: lines(run, name) for name in ("thor", "sgd")}
    for path in sorted(run.rglob("step-*")):
        state = torch.load(path / "state.pt", weights_only=True)
        for part in (state, state["score"], state["best"]):
            del part["seconds"]
        weights = [(path / f"{kind}.safetensors").read_bytes() for kind in ("model", "averaged")]
        found[str(path.relative_to(run))] = [state, weights, (path / "recipe.yaml").read_text()]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcomes of runs that never stopped, by the number of processes."""
    place = tmp_path_factory.mktemp("whole")
    for ranks in (None, 2):
        code, out, err = go(place, NOTHING, f"run{ranks}", ranks=ranks)
        assert code == 0, out + err
    return {ranks: outcome(place / f"run{ranks}") for ranks in (None, 2)}


@pytest.mark.slow
def test_killed_at_any_moment_equals_never_stopped(tmp_path, whole):
    # the evaluations of steps 3 and 9 are the best so far; the last kill is in the second optimizer
    kills = "claim:0 step:3 writing:5 writing:9 evaluation:9 writing:10 writing:3"
    for kill in kills.split(" "):
        resume = ["--resume"] if (tmp_path / "run/recipe.yaml").exists() else []
        code, out, err = go(tmp_path, f"0:{kill}:SIGKILL", "run", *resume)
        assert code == -signal.SIGKILL, f"{kill}: {out}\n{err}"
        assert "writing" not in kill or any((tmp_path / "run").rglob(".writing-step-*")), kill
    code, out, err = go(tmp_path, NOTHING, "run", "--resume")
    assert code == 0, err
    assert "damaged" not in out
    assert_same(outcome(tmp_path / "run"), whole[None])
    assert not list((tmp_path / "run").rglob(".writing-*"))


@pytest.mark.parametrize(
    ("ranks", "moment", "step"),
    [(None, "step", 7), (2, "step", 7), (None, "evaluation", 9)],
)
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_signal_saves_and_stops(tmp_path, whole, name, ranks, moment, step):
    """Both processes stop after the same step; an evaluation stops within the batch."""
    plan = f"{1 if ranks else 0}:{moment}:{step}:{name}"
    code, out, err = go(tmp_path, plan, "run", ranks=ranks)
    assert code == 2, out + err
    assert f"torch-thor, start 0: stopped at step {step}, checkpoint written" in err
    assert checkpoints(tmp_path / "run", "thor") == [3, 5, step]  # step 3 is the best
    code, _, err = go(tmp_path, NOTHING, "run", "--resume", ranks=ranks)
    assert code == 0, err
    assert_same(outcome(tmp_path / "run"), whole[ranks])


def torchrun(place, *words):
    """As `torchrun --nproc-per-node=2 --max-restarts=1`: (all ended well, stdout, stderr)."""
    warm.context()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    logs = place / f"logs of {len(list(place.glob('logs*')))}"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="forkserver",
        logs_specs=DefaultLogsSpecs(logs, redirects=Std.ALL),
    )  # fmt: skip
    ended_well = True
    try:
        launch_agent(config, run_script.main_in, [str(place), *words])
    except ChildFailedError:
        ended_well = False
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    said = (sorted(logs.rglob(name)) for name in ("stdout.log", "stderr.log"))
    return ended_well, *("".join(path.read_text() for path in paths) for paths in said)


@pytest.mark.slow
def test_torchrun_starts_again_and_the_run_continues(tmp_path, whole):
    ended_well, out, err = torchrun(tmp_path, f"1:step:7:SIGKILL,{NOTHING}", "run")
    assert ended_well, out + err
    assert_same(outcome(tmp_path / "run"), whole[2])
