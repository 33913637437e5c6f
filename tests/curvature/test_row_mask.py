"""The mask that leaves rows out, of embeddings and of what comes after them."""

from itertools import product

import pytest
import torch
from torch import nn

from comparing import DAMPING, assert_matches_reference, having
from tiny import assert_same, cross_entropy, train, weights
from torch_thor import THOR


def language_model(padding_idx=None):
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(nn.Embedding(11, 4, padding_idx), nn.Tanh(), *layers).double()


def sentences():
    """(tokens (3, 4), labels, mask): the mask leaves out four places."""
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 3] = mask[1, 1:] = False
    return torch.randint(11, (3, 4)), torch.randint(3, (3, 4)), mask


def test_masks_of_micro_batches_padding_index_and_predicted_tokens():
    """Rows are the 8 real tokens, and N counts the predicted tokens."""
    x, labels, mask = sentences()
    some = torch.zeros_like(mask)
    some[0, 1] = some[1, 0] = some[2, 2] = True
    x[0, 0] = x[1, 2] = 5
    for predicted, padding, parts in product(
        (mask, some), (None, 5), ([slice(0, 3)], [slice(0, 1), slice(1, 3)])
    ):
        model, terms = language_model(padding), int(predicted.sum())
        optimizer = THOR(model, lr=0.0, damping=DAMPING, split_dim=3)
        optimizer.loss_terms = lambda n=terms: n
        for part in parts:
            optimizer.row_mask = mask[part]
            chosen = predicted[part]
            loss = cross_entropy(labels[part][chosen])(model(x[part])[chosen])
            (loss * chosen.sum() / terms).backward()
        optimizer.step()
        # the same tokens in a single row
        loss = lambda output, its=predicted[mask]: cross_entropy(labels[mask][its])(output[its])  # noqa: E731
        same = {"terms": terms, "split_dim": 3, "optimizer": optimizer}
        assert_matches_reference(model, x[mask], loss, **same)


def test_mask_holds_for_layers_of_its_shape_only():
    """A pooled classifier after the sequence has a row a sentence: all of them count."""
    pool = type("Pool", (nn.Module,), {"forward": lambda self, y: y.mean(1)})()
    x, _, mask = sentences()
    model = nn.Sequential(nn.Embedding(11, 4), pool, nn.Linear(4, 3)).double()
    loss = lambda output: (output**3).sum() / 3  # noqa: E731
    optimizer = having(THOR(model, lr=0.0, damping=DAMPING), row_mask=mask)
    loss(model(x)).backward()
    optimizer.step()
    same = {"terms": 3, "split_dim": 128, "optimizer": optimizer}
    assert_matches_reference(model, x, loss, mask=mask.numpy(), **same)
    assert [curvature.rows_per_term for curvature in optimizer.curvature.values()] == [8 / 3, 1]


def test_mask_that_fits_no_layer_is_an_error():
    """On a refresh step; an ordinary step looks at no mask."""
    x, labels, mask = sentences()
    model = language_model()
    optimizer = THOR(model, update_interval=2)
    before = weights(model)
    optimizer.row_mask = mask.T
    cross_entropy(labels)(model(x)).backward()
    with pytest.raises(RuntimeError, match=r"row_mask of shape \(4, 3\) fits no layer"):
        optimizer.step()
    assert_same(weights(model), before)
    optimizer.zero_grad()
    for own in (mask, mask.T):
        optimizer.row_mask = own
        train(model, optimizer, [(x, labels)])
    assert all(curvature.refreshes == 1 for curvature in optimizer.curvature.values())
    with pytest.raises(ValueError, match=r"row_mask=torch.float32 \(3, 4\): must be a bool tensor"):
        optimizer.row_mask = mask.float()
