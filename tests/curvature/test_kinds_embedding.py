"""Factors of embeddings (token counts) and of Hugging Face's Conv1D, and the mask that leaves rows out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from comparing import assert_factors, assert_matches_reference, refreshed
from reference import by_stages, factors_of, gradients
from tiny import assert_same, cross_entropy, weights
from torch_thor import THOR


def loss_of(terms):
    return lambda output: (output**3).sum() / terms


def language_model(**options):
    """Tokens → vectors → classes."""
    return nn.Sequential(
        nn.Embedding(11, 4, **options), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


# ---------------------------------------------------------------------------------------- embedding


def test_embedding():
    """A is diagonal whatever the split; G is cut as any other. One token alone is one term."""
    for shape in ((6,), (3, 4), (2, 3, 2), ()):
        for split_dim in (None, 1, 3):
            terms = shape[0] if shape else 1
            x = torch.randint(11, shape)
            assert_matches_reference(language_model(), x, loss_of(terms), terms=terms, split_dim=split_dim)


def test_token_counts_by_hand():
    """Six tokens: two 1s, three 4s, one 0. A = diag(1, 2, 0, 0, 3) / 6, and T = 6 / 2."""
    model = nn.Sequential(nn.Embedding(5, 2)).double()
    optimizer = refreshed(model, torch.tensor([[4, 1, 4], [0, 1, 4]]), loss_of(2))
    A, _ = optimizer.curvature["0"].factors()
    torch.testing.assert_close(A, torch.diag(torch.tensor([1, 2, 0, 0, 3]).double() / 6))
    assert optimizer.curvature["0"].rows_per_term == 3


def test_padding_index_is_no_row():
    x = torch.tensor([[0, 3, 0, 2], [7, 0, 0, 0]])
    model = nn.Sequential(nn.Embedding(11, 4, padding_idx=0)).double()
    optimizer = assert_matches_reference(model, x, loss_of(2), terms=2, split_dim=None)
    assert optimizer.curvature["0"].rows_per_term == 1.5
    assert optimizer.curvature["0"].factors()[0][0, 0] == 0


def test_the_diagonal_alone_is_stored():
    """A vocabulary squared would not fit anywhere."""
    model = nn.Sequential(nn.Embedding(1000, 4))
    optimizer = refreshed(model, torch.randint(1000, (8,)), loss_of(8))
    state = optimizer.state[model[0].weight]
    for key in ("A", "A_inverse"):
        assert state[key].shape == (1000, 1)
        assert f"{key}_tail" not in state


@given(
    tokens=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    width=st.integers(1, 5),
    padding=st.one_of(st.none(), st.integers(0, 6)),
    split_dim=st.one_of(st.none(), st.integers(1, 6)),
)
def test_any_embedding(tokens, width, padding, split_dim):
    model = nn.Sequential(nn.Embedding(7, width, padding_idx=padding)).double()
    x = torch.tensor(tokens)
    if all(token == padding for token in tokens):
        return
    assert_matches_reference(model, x, loss_of(len(x)), terms=len(x), split_dim=split_dim)


# ---------------------------------------------------------------------------- Hugging Face's Conv1D


def test_hugging_face_conv1d():
    for leading in ((6,), (3, 4), (2, 1, 3)):
        for split_dim in (None, 1, 4):
            model = nn.Sequential(Conv1D(7, 5), nn.Tanh(), Conv1D(3, 7)).double()
            x, terms = torch.randn(*leading, 5).double(), leading[0]
            optimizer = assert_matches_reference(model, x, loss_of(terms), terms=terms, split_dim=split_dim)
    assert [(e.kind, e.factor_sizes) for e in optimizer.coverage()] == [
        ("Conv1D", sizes) for sizes in ((5, 7), (7,), (7, 3), (3,))
    ]


def test_a_conv1d_of_another_library_is_not_hugging_faces():
    """The name alone proves nothing."""

    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 7))

        def forward(self, x):
            return x @ self.weight

    optimizer = THOR(nn.Sequential(Conv1D(), nn.Linear(7, 3)))
    assert set(optimizer.curvature) == {"1"}


# ---------------------------------------------------------------------------------------- row_mask


def sentences():
    """(tokens (3, 4), labels, mask): the mask leaves out some places."""
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 3] = mask[1, 1:] = False
    return torch.randint(11, (3, 4)), torch.randint(3, (3, 4)), mask


def masked_loss(labels, mask):
    return lambda output: nn.functional.cross_entropy(output[mask], labels[mask])


def masked_step(model, x, loss, mask, **options):
    optimizer = THOR(model, lr=0.0, damping=0.07, **options)
    optimizer.row_mask = mask
    loss(model(x)).backward()
    optimizer.step()
    return optimizer


def assert_masked(optimizer, model, x, loss, mask, terms, split_dim=128):
    assert_matches_reference(model, x, loss, terms=terms, split_dim=split_dim, optimizer=optimizer, mask=mask.numpy())


def test_masked_rows_leave_both_factors():
    """And those of the same tokens without padding, in one row, are the same."""
    for split_dim in (None, 3, 128):
        x, labels, mask = sentences()
        model, loss, terms = language_model(), masked_loss(labels, mask), int(mask.sum())
        optimizer = masked_step(model, x, loss, mask, loss_terms=terms, split_dim=split_dim)
        assert_masked(optimizer, model, x, loss, mask, terms, split_dim)
        assert all(curvature.rows_per_term == 1 for curvature in optimizer.curvature.values())
        packed = {"terms": terms, "split_dim": split_dim, "optimizer": optimizer}
        assert_matches_reference(model, x[mask], cross_entropy(labels[mask]), **packed)


def test_mask_and_padding_index_together():
    x, labels, mask = sentences()
    x[0, 0] = x[1, 2] = 5
    model, loss = language_model(padding_idx=5), masked_loss(labels, mask)
    assert_masked(masked_step(model, x, loss, mask), model, x, loss, mask, 3)


def test_predicted_tokens_are_other_than_real_ones():
    """Masked language modelling: 8 real tokens, 3 predicted. Rows are the real tokens, N counts the predicted."""
    x, labels, mask = sentences()
    predicted = torch.zeros_like(mask)
    predicted[0, 1] = predicted[1, 0] = predicted[2, 2] = True
    model, loss = language_model(), masked_loss(labels, predicted)
    optimizer = masked_step(model, x, loss, mask, loss_terms=lambda: predicted.sum())
    assert_masked(optimizer, model, x, loss, mask, 3)
    assert optimizer.curvature["2"].rows_per_term == 8 / 3


def test_all_true_is_none_bit_for_bit():
    x, labels, _ = sentences()
    models = language_model(), language_model()
    models[1].load_state_dict(models[0].state_dict())
    for model, mask in zip(models, (None, torch.ones(3, 4, dtype=torch.bool)), strict=True):
        optimizer = THOR(model, update_interval=2)
        for _ in range(3):
            optimizer.row_mask = mask
            cross_entropy(labels)(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(weights(models[0]), weights(models[1]))


def test_each_micro_batch_has_its_own_mask():
    x, labels, mask = sentences()
    model, terms = language_model(), int(mask.sum())
    optimizer = THOR(model, lr=0.0, damping=0.07, loss_terms=terms)
    for part in (slice(0, 1), slice(1, 3)):
        optimizer.row_mask = mask[part]
        loss = masked_loss(labels[part], mask[part])(model(x[part]))
        (loss * int(mask[part].sum()) / terms).backward()
    optimizer.step()
    _, uses = gradients(model, x, masked_loss(labels, mask), by_stages)
    for name, pairs in uses.items():
        expected = factors_of(model.get_submodule(name), pairs, terms, terms, 128, mask.numpy())
        assert_factors(optimizer.curvature[name], expected)


def test_mask_holds_for_layers_of_its_shape_only():
    """A pooled classifier after the sequence has a row a sentence: all of them count."""

    class Pool(nn.Module):
        def forward(self, y):
            return y.mean(1)

    x, _, mask = sentences()
    model, loss = nn.Sequential(nn.Embedding(11, 4), Pool(), nn.Linear(4, 3)).double(), loss_of(3)
    optimizer = masked_step(model, x, loss, mask)
    _, uses = gradients(model, x, loss, by_stages)
    assert_factors(optimizer.curvature["0"], factors_of(model[0], uses["0"], 3, 3, 128, mask.numpy()))
    assert_factors(optimizer.curvature["2"], factors_of(model[2], uses["2"], 3, 3, 128))


def test_mask_that_fits_no_layer_is_an_error():
    """On a refresh step; on other steps no mask is looked at, whatever its shape."""
    x, labels, mask = sentences()
    model = language_model()
    optimizer = THOR(model, update_interval=2)
    before = weights(model)
    optimizer.row_mask = mask.T
    cross_entropy(labels)(model(x)).backward()
    with pytest.raises(RuntimeError, match=r"row_mask of shape \(4, 3\) fits no layer"):
        optimizer.step()
    assert_same(weights(model), before)
    for own in (mask, mask.T):
        optimizer.zero_grad()
        optimizer.row_mask = own
        cross_entropy(labels)(model(x)).backward()
        optimizer.step()
    assert all(curvature.refreshes == 1 for curvature in optimizer.curvature.values())


@pytest.mark.parametrize("mask", [torch.ones(3, 4), [[True]], torch.tensor(True), np.ones((3, 4), dtype=bool), True])
def test_what_is_no_mask(mask):
    optimizer = THOR(language_model())
    with pytest.raises(ValueError, match=r"(?s)row_mask=.*must be a bool tensor"):
        optimizer.row_mask = mask
    assert optimizer.row_mask is None
