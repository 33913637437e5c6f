"""What LAMB and AGCSGD share: copies, checkpoints, groups, and parameters that are excluded."""

import copy
import itertools
import pickle

import pytest
import torch
from test_contract import OPTIONS
from test_state import FLAT, by_distributed_checkpoint, by_state_dict
from torch import nn

from tiny import assert_same, backward, batches, cross_entropy, mlp, train, weights
from torch_thor import AGCSGD, LAMB

STREAM = batches(6, dtype=torch.float32)

pytestmark = pytest.mark.parametrize("make", [LAMB, AGCSGD])


def build(dtype=torch.float32):
    torch.manual_seed(1)
    return mlp(dtype=dtype)


def pair(make, dtype=torch.float32):
    model = build(dtype)
    return model, make(model, **OPTIONS[make])


def test_maximize_takes_the_steps_of_the_negative_loss(make):
    (model, optimizer), (twin, other) = pair(make), pair(make)
    optimizer.param_groups[0]["maximize"] = True
    for x, labels in STREAM:
        (-cross_entropy(labels)(model(x))).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_by_itself(make, copied):
    model, optimizer = pair(make)
    train(model, optimizer, STREAM[:2])
    twin, other = copied((model, optimizer))
    before = weights(twin)
    train(model, optimizer, STREAM[2:])
    assert_same(weights(twin), before)
    train(twin, other, STREAM[2:])
    assert_same(weights(twin), weights(model))
    assert other.excluded == optimizer.excluded != ()


def test_parameters_without_gradients_are_not_changed(make):
    model, optimizer = pair(make)
    before = weights(model)
    optimizer.step()
    assert_same(weights(model), before)
    model[0](STREAM[0][0]).sum().backward()
    optimizer.step()
    changed = {key for key, value in weights(model).items() if not value.equal(before[key])}
    assert changed == {"0.weight", "0.bias"}


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)
@pytest.mark.parametrize("carry", [by_state_dict, by_distributed_checkpoint, FLAT])
def test_a_resumed_run_equals_a_run_that_was_not_stopped(make, carry):
    """A file contains all options except `exclude`."""
    for dtype, stop in itertools.product((torch.float32, torch.bfloat16), (0, 3)):
        stream, whole, first = batches(6, dtype=dtype), pair(make, dtype), pair(make, dtype)
        train(*whole, stream)
        train(*first, stream[:stop])
        model, given = build(dtype), ["exclude"] if carry is by_state_dict else OPTIONS[make]
        resumed = make(model, **{key: OPTIONS[make][key] for key in given})
        carry(first, (model, resumed))
        train(model, resumed, stream[stop:])
        assert_same(weights(model), weights(whole[0]), f"{dtype}, {stop} steps")


def test_groups_have_options_of_their_own(make):
    model, twin = build(), build()
    kept = {"lr": 0.1, "weight_decay": 0.2, "exclude": ["0.weight", "2.bias"]}
    own = {"lr": 0.02, "weight_decay": 0.0}
    optimizer = make([{"params": model[0].parameters()}], model=model, **kept)
    optimizer.add_param_group({"params": model[2].parameters(), **own})
    assert optimizer.excluded == ("0.weight", "2.bias")
    first = make(twin[0].parameters(), model=twin, **kept)
    second = make(twin[2].named_parameters("2"), model=twin, **kept | own)
    for batch in STREAM:
        train(model, optimizer, [batch])
        backward(twin, batch)
        first.step()
        second.step()
        twin.zero_grad()
    assert_same(weights(model), weights(twin))


def test_wrong_exclusions_and_sparse_gradients_are_refused(make):
    model = build()
    for error, said, params, options in (
        (ValueError, r"'hed' matches no parameter; the model has 0\.weight", model, ["0", "hed"]),
        (TypeError, r"without a model.*model=model", model.parameters(), "0"),
        (TypeError, r"exclude=.*Linear.*must be a name, a pattern", model, model[4]),
    ):
        with pytest.raises(error, match=said):
            make(params, exclude=options)
    model.append(nn.Embedding(5, 3, sparse=True))
    optimizer = make(model)
    (model[5](torch.tensor([1])).sum() + model[0](torch.ones(1, 5)).sum()).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"'5\.weight'.*layout torch\.sparse_coo.*sparse=False"):
        optimizer.step()
    assert_same(weights(model), before)
