"""A masked language model trained in two phases: what each step sees, and a run that is resumed in either of them."""

import json

import pytest
import torch

from torch_thor import THOR
from torch_thor.training import Callback, StoppedError, UserError, load_recipe, new_run, recipe_yaml, train
from torch_thor.training.callbacks import MetricsFile
from torch_thor.training.checkpoints import Checkpoints, StopSignal, newest_whole, restore
from torch_thor.training.data import Shard, epoch_order
from torch_thor.training.tasks import MaskedLM

LONG, SHORT, STEPS = 48, 24, (4, 4)
PHASES = (
    f"phases=[{{steps: {STEPS[0]}, length: {SHORT}, batch_size: 6, accumulation: 2}}, "
    f"{{steps: {STEPS[1]}, lr_factor: 0.5}}]"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return [
        f"data.root={cache}", "data.text.vocab_size=300", f"data.text.length={LONG}", "batch_size=4", "device=cpu",
        "epochs=1", "eval_interval=100", "checkpoint_interval=100", "optimizer=thor", "update_interval=3", PHASES,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def recipe(words):
    return load_recipe("bert-tiny", words)


@pytest.fixture(scope="module")
def task(recipe):
    return MaskedLM.open(recipe, torch.device("cpu"), lambda _: None, pytest.fail)


class Watch(Callback):
    """What the network is given, part by part, and the loss terms that THOR is told."""

    def __init__(self, run):
        self.parts, self.terms = [], []
        run.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model, args, kwargs):
        if model.training:
            self.parts.append(kwargs["input_ids"])

    def after_step(self, run, point):
        self.terms.append((run.optimizer.loss_terms, point.terms))


def test_each_step_has_the_examples_of_its_phase(task, recipe):
    run = new_run(recipe, "thor", task)
    assert (run.total_steps, run.steps_per_epoch, len(run.streams.train)) == (8, 8, 8)
    assert run.model.config.max_position_embeddings == 512
    watch = Watch(run)
    record = train(run, [watch])
    assert [tuple(part.shape) for part in watch.parts] == [(3, SHORT)] * 8 + [(4, LONG)] * 4
    short, long = task.train[SHORT], task.train[LONG]
    first = epoch_order(len(short.corpus), 0, 0)[:3].tolist()
    assert watch.parts[0].tolist() == [short.example(n, 0, 0)["input_ids"].tolist() for n in first]
    # the second phase begins where the first one's epochs end, so that no masks come twice
    begin = epoch_order(len(long.corpus), 0, 1)[:4].tolist()
    assert watch.parts[8].tolist() == [long.example(n, 0, 1)["input_ids"].tolist() for n in begin]
    assert all(told == terms > 0 for told, terms in watch.terms)
    lr = recipe.optimizers["thor"].lr
    assert [point.lr for point in record.steps] == pytest.approx(
        [lr * (1 - t / 8) * (1 if t < 4 else 0.5) for t in range(8)]
    )
    evaluation = next(iter(run.streams.evaluation))
    assert evaluation["input_ids"].shape[1] == LONG


class StopAt(Callback):
    def __init__(self, step, stop):
        self.step, self.stop = step, stop

    def after_step(self, run, point):
        self.stop.received = point.step == self.step


def go(folder, recipe, task, *, stop_at=None, resume=False):
    run = new_run(recipe, "thor", task, resumed=resume)
    stop, metrics = StopSignal(), MetricsFile(folder / "metrics.jsonl")
    if resume:
        torch.manual_seed(999)  # nothing of the first process's random numbers is left
        restore(run, newest_whole(folder / "checkpoints", pytest.fail), metrics.path, pytest.fail)
    checkpoints = Checkpoints(
        folder / "checkpoints", metrics, stop, interval=100, keep=1, optimizer="thor", recipe=recipe_yaml(recipe)
    )
    try:
        train(run, [StopAt(stop_at, stop), metrics, checkpoints])
    finally:
        metrics.close()
    return run


@pytest.fixture(scope="module")
def whole(recipe, task):
    run = new_run(recipe, "thor", task)
    train(run)
    return run


@pytest.mark.parametrize("step", [2, 4, 5], ids=["in the first phase", "between the phases", "in the second phase"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, recipe, task, whole, step):
    with pytest.raises(StoppedError):
        go(tmp_path, recipe, task, stop_at=step)
    again = go(tmp_path, recipe, task, resume=True)
    assert [point.loss for point in again.record.steps] == [point.loss for point in whole.record.steps]
    assert again.record.evaluations[-1].metrics == whole.record.evaluations[-1].metrics
    for own, wanted in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert own.equal(wanted)
    for own, wanted in zip(again.optimizer.curvature.values(), whole.optimizer.curvature.values(), strict=True):
        assert all(a is b is None or a.equal(b) for a, b in zip(own.factors(), wanted.factors(), strict=True))


def test_ranks_share_the_batches_of_each_phase(task):
    whole = list(task.open_data(Shard()).train)
    parts = [list(task.open_data(Shard(rank, 2)).train) for rank in range(2)]
    assert len(whole) == 8
    for n, batch in enumerate(whole):
        assert torch.cat([part[n]["input_ids"] for part in parts]).equal(batch["input_ids"])


def test_phases_that_a_corpus_cannot_give_are_refused(words, recipe, task):
    folder = next(iter(task.train.values())).corpus.folder
    lacking = [*words, "data.name=corpus", f"data.root={folder}", "phases=[{steps: 3}, {steps: 2, length: 64}]"]
    with pytest.raises(UserError, match=r"phases\[1\]\.length=64: .* was prepared for examples of 24, 48 tokens"):
        MaskedLM.open(load_recipe("bert-tiny", lacking), torch.device("cpu"), pytest.fail, pytest.fail)
    large = load_recipe("bert-tiny", [*words, "phases=[{steps: 3}, {steps: 2, batch_size: 100000}]"])
    with pytest.raises(UserError, match=r"phases\[1\]: batch_size=100000 is larger than the training set"):
        new_run(large, "thor", MaskedLM(task.train, task.held_out, large, task.device))


def test_positions_suffice_for_the_longest_phase(words, task, tmp_path):
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    file.write_text(json.dumps({"model_type": "bert", "max_position_embeddings": LONG - 1, **sizes}))
    change = [f"model={file}", f"data.text.length={SHORT}"]
    for phases, refused in ((f"phases=[{{steps: 2}}, {{steps: 2, length: {LONG}}}]", True), ("phases=[]", False)):
        own = load_recipe("bert-tiny", [*words, *change, phases])
        built = MaskedLM(task.train, task.train[SHORT], own, task.device)
        if refused:
            with pytest.raises(UserError, match=f"has {LONG - 1} positions, and examples have {LONG} tokens"):
                built.build_model()
        else:
            assert built.build_model().config.max_position_embeddings == LONG - 1


def test_thor_takes_masked_tokens_as_terms_in_both_phases(whole):
    assert isinstance(whole.optimizer, THOR)
    assert all(layer.refreshes for layer in whole.optimizer.curvature.values())
