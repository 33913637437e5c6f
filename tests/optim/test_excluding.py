"""What LAMB and AGCSGD share, beside the contract of all: copies, checkpoints, exclusions."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from test_contract import OPTIONS
from test_state import FLAT, FULL, by_distributed_checkpoint, by_state_dict
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


def maximised(model, optimizer, stream):
    optimizer.param_groups[0]["maximize"] = True
    for x, labels in stream:
        (-cross_entropy(labels)(model(x))).backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(copy_of, model, optimizer, stream):
    """The copy goes on by itself, and so does what was copied."""
    train(model, optimizer, stream[:2])
    other, twin = copy_of((optimizer, model))
    still = weights(twin)
    train(model, optimizer, stream[2:])
    assert_same(weights(twin), still)
    train(twin, other, stream[2:])
    assert_same(weights(twin), weights(model))
    assert other.excluded == optimizer.excluded != ()
    twin.append(nn.Linear(3, 3))
    other.add_param_group({"params": twin[5].parameters()})
    assert repr(other)


def test_every_way_of_training_takes_the_same_steps(make):
    twin, other = pair(make)
    train(twin, other, STREAM)
    pickled = partial(copied, lambda both: pickle.loads(pickle.dumps(both)))
    for way in (maximised, partial(copied, copy.deepcopy), pickled):
        model, optimizer = pair(make)
        way(model, optimizer, STREAM)
        assert_same(weights(model), weights(twin), f"{way}")


def test_parameters_without_gradient_or_numbers_are_passed_over(make):
    model, optimizer = pair(make)
    model[4].register_parameter("hollow", nn.Parameter(torch.ones(0, 3)))
    optimizer.add_param_group({"params": [model[4].hollow]})
    before = weights(model)
    model[0].bias.requires_grad_(False)  # its gradient counts all the same
    optimizer.step()
    assert_same(weights(model), before)
    for p in (*model[0].parameters(), model[4].hollow):
        p.grad = torch.ones_like(p)
    optimizer.step()
    changed = {key for key, value in weights(model).items() if not value.equal(before[key])}
    assert changed == {"0.weight", "0.bias"}


@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process"
)
@pytest.mark.parametrize("carry", [by_state_dict, by_distributed_checkpoint, FLAT, FULL])
def test_resume_is_never_having_stopped(make, carry):
    """From a file options come too, but for what is excluded."""
    for dtype, stop in itertools.product((torch.float32, torch.bfloat16, torch.float64), (0, 1, 3)):
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
    first, second = (
        make(twin[0].parameters(), model=twin, **kept),
        make(twin[2].named_parameters("2"), model=twin, **kept | own),
    )
    for batch in STREAM:
        train(model, optimizer, [batch])
        backward(twin, batch)
        first.step()
        second.step()
        twin.zero_grad()
    assert_same(weights(model), weights(twin))


def test_what_is_refused(make):
    model, stranger = build(), [nn.Parameter(torch.ones(2))]
    for error, said, params, options in (
        (ValueError, r"'hed' matches no parameter; the model has 0\.weight", model, ["0", "hed"]),
        (TypeError, r"without a model.*model=model", model.parameters(), "0"),
        (TypeError, r"exclude=.*Linear.*must be a name, a pattern", model, model[4]),
    ):
        with pytest.raises(error, match=said):
            make(params, exclude=options)
    optimizer = make(model[0].parameters(), model=model)
    for call in (
        lambda p: make(p, model=model),
        lambda p: optimizer.add_param_group({"params": p}),
    ):
        with pytest.raises(ValueError, match=r"\(2,\) are not in the model"):
            call(stranger)
    assert len(optimizer.param_groups) == 1
    model.append(nn.Embedding(5, 3, sparse=True))
    optimizer = make(model)
    (model[5](torch.tensor([1])).sum() + model[0](torch.ones(1, 5)).sum()).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"'5\.weight'.*layout torch\.sparse_coo.*sparse=False"):
        optimizer.step()
    assert_same(weights(model), before)
