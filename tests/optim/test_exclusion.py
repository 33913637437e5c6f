"""What LAMB and AGCSGD share, beside the contract of all: copies, checkpoints, and what is treated apart."""

import copy
import pickle
from functools import partial

import pytest
import torch
from test_contract import OPTIONS as CONTRACT
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import AGCSGD, LAMB

CLASSES = {"lamb": LAMB, "agc-sgd": AGCSGD}
OPTIONS = {name: CONTRACT[make] for name, make in CLASSES.items()}
STREAM = batches(6, dtype=torch.float32)

pytestmark = pytest.mark.parametrize("name", CLASSES)


def build(dtype=torch.float32):
    torch.manual_seed(1)
    return mlp(dtype=dtype)


def pair(name, dtype=torch.float32, **options):
    model = build(dtype)
    return model, CLASSES[name](model, **OPTIONS[name] | options)


def maximised(model, optimizer, stream):
    optimizer.param_groups[0]["maximize"] = True
    for x, labels in stream:
        (-cross_entropy(labels)(model(x))).backward()
        optimizer.step()
        optimizer.zero_grad()


def replaced(model, optimizer, stream):
    """Accelerate and FSDP2 put other objects into groups and modules after the optimizer was made."""
    swapped = {id(p): nn.Parameter(p.detach().clone()) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [swapped[id(p)] for p in group["params"]]
    for module in model.modules():
        for key, p in list(module._parameters.items()):
            module._parameters[key] = swapped[id(p)]
    train(model, optimizer, stream)


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


def test_every_way_of_training_takes_the_same_steps(name):
    twin, other = pair(name)
    train(twin, other, STREAM)
    pickled = partial(copied, lambda both: pickle.loads(pickle.dumps(both)))
    for way in (maximised, replaced, partial(copied, copy.deepcopy), pickled):
        model, optimizer = pair(name)
        way(model, optimizer, STREAM)
        assert_same(weights(model), weights(twin), f"{way}")


def test_parameters_without_gradient_or_numbers_are_passed_over(name):
    model, optimizer = pair(name)
    model[4].register_parameter("hollow", nn.Parameter(torch.ones(0, 3)))
    optimizer.add_param_group({"params": [model[4].hollow]})
    before = weights(model)
    model[0].bias.requires_grad_(False)  # its gradient counts all the same
    optimizer.step()
    assert_same(weights(model), before)
    for p in (*model[0].parameters(), model[4].hollow):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert {key for key, value in weights(model).items() if not value.equal(before[key])} == {"0.weight", "0.bias"}


def in_a_file(first, second, path):
    torch.save([one.state_dict() for one in first], path)
    for one, state in zip(second, torch.load(path, weights_only=True), strict=True):
        one.load_state_dict(state)


def distributed(first, second, path, **options):
    """Both sides may be fresh: DCP then takes a step of zero gradients at lr 0, which must not count."""
    options = StateDictOptions(**options)
    dcp.save(dict(zip("mo", get_state_dict(*first, options=options), strict=True)), checkpoint_id=path, no_dist=True)
    loaded = dict(zip("mo", get_state_dict(*second, options=options), strict=True))
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    set_state_dict(*second, model_state_dict=loaded["m"], optim_state_dict=loaded["o"], options=options)


CHECKPOINTS = {
    "file": in_a_file,
    "plain": distributed,
    "flat": partial(distributed, flatten_optimizer_state_dict=True),
    "full": partial(distributed, full_state_dict=True, cpu_offload=True),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_resume_is_never_having_stopped(name, checkpoint, tmp_path):
    """From a file options come too, but for what is excluded."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        stream = batches(6, dtype=dtype)
        whole, whole_optimizer = pair(name, dtype)
        train(whole, whole_optimizer, stream)
        for stop in (0, 1, 3):
            first = pair(name, dtype)
            train(*first, stream[:stop])
            second = build(dtype)
            with torch.no_grad():
                for p in second.parameters():
                    p.add_(1.0)
            given = ["exclude"] if checkpoint == "file" else OPTIONS[name]
            resumed = CLASSES[name](second, **{key: OPTIONS[name][key] for key in given})
            CHECKPOINTS[checkpoint](first, (second, resumed), tmp_path / f"{dtype}-{stop}")
            train(second, resumed, stream[stop:])
            assert_same(weights(second), weights(whole), f"{dtype}, {stop} steps")


def test_groups_have_options_of_their_own(name):
    model, twin, make = build(), build(), CLASSES[name]
    own, kept = {"lr": 0.02, "weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.2, "exclude": ["0.weight", "2.bias"]}
    optimizer = make(
        [{"params": [*model[0].parameters(), *model[4].parameters()]}, {"params": []}], model=model, **kept
    )
    optimizer.add_param_group({"params": list(model[2].parameters()), **own})
    assert optimizer.excluded == ("0.weight", "2.bias")
    others = [
        make([*twin[0].parameters(), *twin[4].parameters()], model=twin, **kept),
        make(twin[2].named_parameters(prefix="2"), model=twin, **kept | own),
    ]
    for x, labels in STREAM:
        train(model, optimizer, [(x, labels)])
        cross_entropy(labels)(twin(x)).backward()
        for other in others:
            other.step()
        twin.zero_grad()
    assert_same(weights(model), weights(twin))


def test_excluded_by_name_pattern_and_rule(name):
    model = build()
    model.tied = model[2].weight  # a second name of the same weight
    for exclude, expected in (
        ((), ()),
        ([], ()),
        ("tied", ("tied",)),
        ("2.weight", ("tied",)),
        ("4", ("4.weight", "4.bias")),
        ((n for n in ["*.bias", "0", "-4.*"]), ("0.weight", "0.bias", "2.bias")),
        (lambda n, p: n == "0.bias" and p is model[0].bias, ("0.bias",)),
    ):
        assert CLASSES[name](model, exclude=exclude).excluded == expected


@pytest.mark.parametrize("foreach", [True, False])
def test_what_is_refused(name, foreach):
    """Before anything moves."""
    model, make = build(), partial(CLASSES[name], foreach=foreach)
    for error, said, call in (
        (ValueError, r"'hed' matches no parameter; the model has 0\.weight", lambda: make(model, exclude=["0", "hed"])),
        (TypeError, r"without a model.*model=model", lambda: make(model.parameters(), exclude="0")),
        (TypeError, r"exclude=.*Linear.*must be a name, a pattern", lambda: make(model, exclude=model[4])),
        (ValueError, r"\(2,\) are not in the model", lambda: make([nn.Parameter(torch.ones(2))], model=model)),
    ):
        with pytest.raises(error, match=said):
            call()
    optimizer = make(model[0].parameters(), model=model)
    with pytest.raises(ValueError, match="not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    train(model, optimizer, STREAM[:1])  # as if nothing had been asked
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match=r"has 1 parameters and had 2.*add_param_group"):
        optimizer.step()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(5, 3, sparse=True))
    optimizer = make(model, **OPTIONS[name])
    (model[2](torch.tensor([1])).sum() + model[0](torch.ones(1, 2)).sum()).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"'2\.weight' has a gradient of layout torch\.sparse_coo.*sparse=False"):
        optimizer.step()
    assert_same(weights(model), before)
