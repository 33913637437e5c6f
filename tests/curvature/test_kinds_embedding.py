"""Which embeddings are known; and the mask that leaves rows out.

Steps of tied embeddings are in tests/optim/test_tied_weights.py.
"""

import importlib
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from comparing import DAMPING, assert_matches_reference, having
from tiny import assert_same, cross_entropy, train, weights
from torch_thor import THOR


def loss_of(terms):
    return lambda output: (output**3).sum() / terms


# ---- the mask ------------------------------------------------------------------------------------


def language_model(padding_idx=None):
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(nn.Embedding(11, 4, padding_idx), nn.Tanh(), *layers).double()


def sentences():
    """(tokens (3, 4), labels, mask): the mask leaves out four places."""
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 3] = mask[1, 1:] = False
    return torch.randint(11, (3, 4)), torch.randint(3, (3, 4)), mask


def test_masks_of_micro_batches_padding_index_and_predicted_tokens():
    """Rows are the 8 real tokens, N counts the predicted: as of the same tokens in one row."""
    x, labels, mask = sentences()
    some = torch.zeros_like(mask)
    some[0, 1] = some[1, 0] = some[2, 2] = True
    x[0, 0] = x[1, 2] = 5
    for split_dim, predicted, padding, parts in product(
        (None, 3, 128), (mask, some), (None, 5), ([slice(0, 3)], [slice(0, 1), slice(1, 3)])
    ):
        model, terms = language_model(padding), int(predicted.sum())
        optimizer = THOR(model, lr=0.0, damping=DAMPING, split_dim=split_dim)
        optimizer.loss_terms = lambda n=terms: n
        for part in parts:
            optimizer.row_mask = mask[part]
            chosen = predicted[part]
            loss = cross_entropy(labels[part][chosen])(model(x[part])[chosen])
            (loss * chosen.sum() / terms).backward()
        optimizer.step()
        loss = lambda output, its=predicted[mask]: cross_entropy(labels[mask][its])(output[its])  # noqa: E731
        same = {"terms": terms, "split_dim": split_dim, "optimizer": optimizer}
        assert_matches_reference(model, x[mask], loss, **same)


def test_mask_holds_for_layers_of_its_shape_only():
    """A pooled classifier after the sequence has a row a sentence: all of them count."""
    pool = type("Pool", (nn.Module,), {"forward": lambda self, y: y.mean(1)})()
    x, _, mask = sentences()
    model, loss = nn.Sequential(nn.Embedding(11, 4), pool, nn.Linear(4, 3)).double(), loss_of(3)
    optimizer = having(THOR(model, lr=0.0, damping=DAMPING), row_mask=mask)
    loss(model(x)).backward()
    optimizer.step()
    assert_matches_reference(
        model, x, loss, terms=3, split_dim=128, optimizer=optimizer, mask=mask.numpy()
    )
    assert [curvature.rows_per_term for curvature in optimizer.curvature.values()] == [8 / 3, 1]


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
    optimizer.zero_grad()
    for own in (mask, mask.T):
        optimizer.row_mask = own
        train(model, optimizer, [(x, labels)])
    assert all(curvature.refreshes == 1 for curvature in optimizer.curvature.values())
    with pytest.raises(ValueError, match=r"row_mask=torch.float32 \(3, 4\): must be a bool tensor"):
        optimizer.row_mask = mask.float()


@pytest.mark.slow
def test_every_scaled_one_of_transformers():
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(
            r"^class (\w*ScaledWordEmbedding)\(nn\.Embedding\)", path.read_text(), re.MULTILINE
        ):
            found.append(name)
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            entries = THOR(
                nn.Sequential(getattr(module, name)(7, 4, 0, embed_scale=3.0), nn.Linear(4, 3))
            ).coverage()
            assert entries[0].preconditioned == (name != "T5Gemma2TextScaledWordEmbedding"), name
    assert len(found) > 10
