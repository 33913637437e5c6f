"""`--resume epochs=N`: the longer run is, bit for bit, the one that had N epochs from the start; or one clear error."""

import pytest

from command_line import assert_refused, checkpoints, contents, lines, newest, state
from resuming import Noisy
from tiny import assert_same
from torch_thor.training import UserError, load_recipe, override
from torch_thor.training.config.lengthening import check_epochs
from torch_thor.training.models import MODELS

STEPS_PER_EPOCH = 11  # of digits, at 128 images a step
WORDS = ["model=noisy", "batch_size=128", "eval_interval=7", "device=cpu", "optimizers.thor.update_interval=6"]


@pytest.fixture(autouse=True)
def noisy(monkeypatch):
    monkeypatch.setitem(MODELS, "noisy", Noisy)


@pytest.fixture
def train(run):
    """`torch-thor train`, to a good end."""

    def call(*words):
        code, _, err = run("train", *words)
        assert code == 0, err

    return call


ALLOWED = {
    "horizon": ["schedule={kind: cosine, horizon_epochs: 4}", "damping_schedule={kind: thor-damping, rate: 0.5}"],
    "thor": [
        "schedule={kind: thor-lr, decay: 2, decay_epochs: 2, horizon_epochs: 5}",
        "damping_schedule={kind: polynomial, end: 0.01, horizon_steps: 60}",
    ],
    "no_damping": [
        "optimizer=sgd",
        "schedule={kind: step, milestones: [1, 2], gamma: 0.3, warmup_epochs: 1.5}",
        "damping_schedule={kind: linear, final: 0.5}",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALLOWED)
def test_a_longer_run_is_the_one_that_was_longer_from_the_start(train, tmp_path, name):
    words = ["digits", "optimizer=thor", "lr=0.01", "ema_decay=0.5", *WORDS, *ALLOWED[name]]
    train(*words, "epochs=3", "--out", "whole")
    train(*words, "epochs=2", "--out", "longer")
    train("--resume", "epochs=3", "--out", "longer")
    folders = [tmp_path / name for name in ("whole", "longer")]
    assert folders[0].joinpath("recipe.yaml").read_text() == folders[1].joinpath("recipe.yaml").read_text()
    optimizer = "sgd" if "optimizer=sgd" in words else "thor"
    both = [newest(folder, optimizer) for folder in folders]
    assert checkpoints(folders[1], optimizer)[-1] == 3 * STEPS_PER_EPOCH
    for weights in ("model.safetensors", "averaged.safetensors"):
        assert (both[0] / weights).read_bytes() == (both[1] / weights).read_bytes()
    assert_same(*(state(path) for path in both))
    for kind in ("step", "refresh"):
        assert lines(folders[0], optimizer, kind) == lines(folders[1], optimizer, kind)
    # the old end was evaluated, and stays so
    evaluated = [[line["step"] for line in lines(folder, optimizer, "eval")] for folder in folders]
    assert evaluated == [[7, 14, 21, 28, 33], [7, 14, 21, 22, 28, 33]]


@pytest.mark.slow
def test_a_run_that_was_stopped_on_its_way_may_be_lengthened(train, tmp_path):
    words = ["digits", "optimizer=sgd", "schedule.kind=constant", *WORDS]
    train(*words, "epochs=3", "--out", "whole")
    train(*words, "epochs=2", "stop_at=0.0001", "--out", "cut")
    assert checkpoints(tmp_path / "cut", "sgd")[-1] == 7
    train("--resume", "epochs=3", "stop_at=null", "--out", "cut")
    both = [newest(tmp_path / run, "sgd") for run in ("whole", "cut")]
    assert both[0].name == both[1].name
    assert (both[0] / "model.safetensors").read_bytes() == (both[1] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("schedules", "epochs", "said"),
    [
        (
            ["schedule.kind=cosine"],
            3,
            ["epochs=3: schedule.kind=cosine ends with the training, ", "schedule of 2 epochs", "weights=CHECKPOINT"],
        ),
        (["schedule={kind: thor-lr, decay: 2}"], 3, ["schedule.kind=thor-lr ends with", "schedule.horizon_epochs "]),
        (
            ["schedule.kind=constant", "damping_schedule={kind: cosine, final: 0.1}"],
            3,
            ["damping_schedule.kind=cosine ends"],
        ),
        (["schedule.kind=constant"], 1, ["epochs=1 is less than the run's 2"]),
        (["schedule={kind: cosine, horizon_epochs: 2.5}"], 3, ["horizon_epochs=2.5 is shorter than the training"]),
    ],
)
def test_what_would_have_been_another_run_is_refused_and_nothing_is_touched(
    run, train, tmp_path, schedules, epochs, said
):
    short = ["eval_interval=1", "stop_at=0.0001"]  # one step will do
    train("digits", "optimizer=thor", "lr=0.01", "epochs=2", *WORDS, *schedules, *short, "--out", "run")
    before = contents(tmp_path / "run")
    assert_refused(run("train", "--resume", f"epochs={epochs}", "--out", "run"), *said)
    assert contents(tmp_path / "run") == before


def test_a_run_of_so_many_steps_is_not_lengthened_by_epochs():
    stored = load_recipe("digits", ["steps=5"])
    check_epochs(stored, override(stored, ["lr=0.1"]))
    with pytest.raises(UserError, match="epochs=30: the length of the run is set by steps=5; leave epochs out"):
        check_epochs(stored, override(stored, ["epochs=30"]))
