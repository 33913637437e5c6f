"""norms.py and normalizer_free.py train through the application's loop, and give the losses that were recorded."""

import importlib
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from first_steps import assert_recorded, take
from torch_thor.bench import describe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # of Debian

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="recorded results are in the repository alone")
needs_fashion_mnist = pytest.mark.skipif(
    not FASHION_MNIST.exists(), reason="needs Debian's package dataset-fashion-mnist"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def norms(monkeypatch, cache):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("HOME", str(cache))  # where prepared text is kept
    return importlib.import_module("norms")


@pytest.fixture
def normalizer_free(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("normalizer_free_run")


def recorded(kind, folder, name):
    """Return a run and its raw data."""
    found = json.loads((RESULTS / folder / f"{name}.json").read_text())
    run = kind(**{item.name: found[item.name] for item in fields(kind) if item.name in found})
    assert run.key == name
    return run, found


@pytest.mark.parametrize(
    "name", ["bert-momentum-lr0.025-seed10", "bert-reference-lr0.1-seed10", "vit-diagonal-lr0.05-seed10"]
)
def test_first_losses_with_each_treatment_are_those_that_were_recorded(norms, name):
    training, found = recorded(norms.Training, "norms", name)
    if training.task == "bert" and describe()["python"] != found["machine"]["python"]:
        pytest.skip("another Python version has another text")
    assert_recorded(training.new_run(), found)


def gradients_of_first_step(norms, task, treatment):
    """Return the gradients that THOR steps with, by name, and the loss terms of the step."""
    run, found = norms.Training(task, treatment, 0.05, 7).new_run(), {}

    def note(optimizer, *_):
        found.update({name: p.grad.clone() for name, p in optimizer.model.named_parameters()})

    run.optimizer.register_step_pre_hook(note)  # after the one that replaces gradients
    points = take(run, 1)
    return found, points[0].terms


@pytest.mark.parametrize("task", ["bert", "vit"])
def test_a_treatment_replaces_the_gradients_of_the_norms_alone(norms, task):
    plain, terms = gradients_of_first_step(norms, task, "momentum")
    model = norms.Training(task, "momentum", 0.05, 7).new_run().model
    of_norms = {
        f"{module}.{own}"
        for module, layer in model.named_modules()
        if isinstance(layer, nn.LayerNorm)
        for own in ("weight", "bias")
    }
    assert len(of_norms) == {"bert": 2 * (1 + 2 * 2 + 1), "vit": 2 * (4 * 2 + 1)}[task]
    assert terms == 64 if task == "vit" else 32 < terms < 32 * 32
    for treatment, power in (("diagonal", 1), ("reference", -1)):
        changed, same_terms = gradients_of_first_step(norms, task, treatment)
        assert same_terms == terms
        for name, g in plain.items():
            wanted = g / (terms**power * g**2 + math.sqrt(0.03)) if name in of_norms else g
            torch.testing.assert_close(changed[name], wanted, rtol=1e-6, atol=0)


@needs_fashion_mnist
@pytest.mark.parametrize(
    "name", ["batches-test_nfnet-agc-sgd-b16-lr0.025-seed1", "parts-test_resnet-sgd-b128-part16-lr0.2-seed1"]
)
def test_first_losses_without_norms_and_with_batch_norm_are_those_that_were_recorded(normalizer_free, name):
    training, found = recorded(normalizer_free.Run, "normalizer_free", name)
    run = training.new_run()
    assert len(found["loss"]) == run.total_steps == 30_000 // training.batch
    assert_recorded(run, found)


@pytest.fixture
def small_data(monkeypatch, normalizer_free):
    """Give a benchmark a few random images in the place of Fashion-MNIST."""
    images, labels = torch.randn(64, 1, 28, 28), torch.arange(64) % 10
    parts = (images, labels), (images[:20], labels[:20])
    monkeypatch.setattr("torch_thor.training.tasks.images.load_images", lambda _: parts)
    return images


def small(normalizer_free, **changed):
    run = normalizer_free.Run("batches", "test_nfnet", "agc-sgd", 16, 0.05, 40, 28, 0, "cpu")
    return replace(run, **changed)


def test_what_a_run_without_norms_keeps(normalizer_free, small_data):
    result = small(normalizer_free).run()
    assert len(result["loss"]) == 2  # 8 images are left over
    assert result["final_loss"] == pytest.approx(result["loss"][-1], abs=1e-5)
    assert 0 < result["share_of_units_clipped"] < 1
    assert result["accuracy"] * 20 == round(result["accuracy"] * 20)
    assert result["diverged"] == (result["final_loss"] >= math.log(10))


def test_parts_change_the_statistics_of_batch_norm_and_nothing_else(normalizer_free, small_data):
    for model, optimizer, same in (("test_nfnet", "agc-sgd", True), ("test_resnet", "sgd", False)):
        whole, parts = (
            small(normalizer_free, model=model, optimizer=optimizer, part=part).run()["loss"] for part in (0, 4)
        )
        assert (parts == pytest.approx(whole, rel=1e-4)) == same


def test_a_run_that_diverges_says_so(normalizer_free, small_data):
    result = small(normalizer_free, optimizer="sgd", lr=1e20, images=64).run()
    assert result["diverged"]
    assert result["final_loss"] is None
    assert result["loss"][-1] is None
    assert None not in result["loss"][:-1]


def test_images_are_scaled_to_the_size_of_choice(normalizer_free, small_data):
    run = small(normalizer_free, size=56).new_run()
    seen = []
    run.model[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run.model(small_data[:2])
    wanted = nn.functional.interpolate(small_data[:2], (56, 56), mode="bilinear")
    assert seen[0].equal(wanted)
