"""Label smoothing in both forms, against numbers computed by hand."""

import math

import pytest
import torch
from torch.nn import functional

from torch_thor.training import UserError, load_recipe, train
from torch_thor.training import image_run as new_run
from torch_thor.training.data import DataSpec, load_data
from torch_thor.training.tasks.smoothing import training_loss

# softmax of these is (1/2, 1/4, 1/8, 1/8)
SCORES = torch.log(torch.tensor([[4.0, 2.0, 1.0, 1.0]], dtype=torch.float64))
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("label", "smoothing", "form", "expected"),
    [
        (0, 0.0, "torch", LN2),
        (0, 0.0, "reference", LN2),
        # s = 0.3, K = 4: 0.7 on the label, 0.1 on each other: 0.7 · 1 + 0.1 · (2 + 3 + 3), in units of ln 2
        (0, 0.3, "reference", 1.5 * LN2),
        # 0.7 · 2 + 0.1 · (1 + 3 + 3)
        (1, 0.3, "reference", 2.1 * LN2),
        # 0.7 + 0.075 on the label, 0.075 on each other: 0.775 · 2 + 0.075 · 7
        (1, 0.3, "torch", 2.075 * LN2),
    ],
)
def test_by_hand(label, smoothing, form, expected):
    loss = training_loss(SCORES, torch.tensor([label]), smoothing, form)
    assert loss.item() == pytest.approx(expected, rel=1e-14)


def test_the_reference_form_is_the_cross_entropy_with_its_targets():
    """1 - s on the label, s / (K - 1) elsewhere, with all 1001 outputs of the reference's ResNet-50."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 1001, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(1000, (6,), generator=generator)
    targets = torch.full((6, 1001), 0.1 / 1000, dtype=torch.float64)
    targets[range(6), labels] = 0.9
    expected = -(targets * functional.log_softmax(scores, dim=1)).sum(dim=1).mean()
    loss = training_loss(scores, labels, 0.1, "reference")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(
        *(torch.autograd.grad(one, scores)[0] for one in (loss, expected)), rtol=1e-9, atol=1e-18
    )


def test_a_recipe_trains_in_its_form():
    data = load_data(DataSpec("digits"))
    words = ["optimizer=sgd", "batch_size=64", "label_smoothing=0.2", "device=cpu", "smoothing_form=reference"]
    first = []
    for form in ("torch", "reference"):
        recipe = load_recipe("digits", [*words, f"smoothing_form={form}"])
        run = new_run(recipe, "sgd", data)
        run.total_steps = 1
        first.append(train(run).steps[0].loss)
    images, labels = next(iter(new_run(recipe, "sgd", data).streams.train))
    targets = torch.full((64, 10), 0.2 / 9).scatter_(1, labels[:, None], 0.8)
    scores = new_run(recipe, "sgd", data).model(images)
    expected = -(targets * functional.log_softmax(scores, dim=1)).sum(dim=1).mean().item()
    assert first[1] == pytest.approx(expected, rel=1e-5)
    assert abs(first[0] - first[1]) > 1e-4


def test_what_cannot_be_is_refused_before_the_first_step():
    with pytest.raises(UserError, match="smoothing_form=keras is none of torch, reference"):
        load_recipe("digits", ["smoothing_form=keras"])
    recipe = load_recipe("digits", ["smoothing_form=reference", "label_smoothing=0.95", "device=cpu"])
    with pytest.raises(UserError, match=r"label_smoothing=0.95 with smoothing_form=reference must be below 0.9 for 10"):
        new_run(recipe, "sgd", load_data(DataSpec("digits")))
