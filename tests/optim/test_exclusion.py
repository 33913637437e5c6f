"""What LAMB and AGCSGD share: one contract for both, and what is treated apart."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import AGCSGD, LAMB

# options that leave nothing at its default, so that a lost one shows
MAKERS = {
    "lamb": lambda model, **options: LAMB(
        model,
        **{"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1, "exclude": ["*.bias", "2"]} | options,
    ),
    "agc-sgd": lambda model, **options: AGCSGD(
        model, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "clip_factor": 0.05, "exclude": "2.*"} | options
    ),
}
CLASSES = {"lamb": LAMB, "agc-sgd": AGCSGD}
STREAM = batches(6, dtype=torch.float32)

each = pytest.mark.parametrize("name", MAKERS)


def build(dtype=torch.float32):
    torch.manual_seed(1)
    return mlp(dtype=dtype)


def pair(name, **options):
    model = build(options.pop("dtype", torch.float32))
    return model, MAKERS[name](model, **options)


def in_dtype(stream, dtype):
    return [(x.to(dtype), labels) for x, labels in stream]


@each
@pytest.mark.parametrize(
    "method", [m for m, _ in inspect.getmembers(torch.optim.SGD, inspect.isfunction) if not m.startswith("_")]
)
def test_method_signatures_are_sgds(name, method):
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(CLASSES[name], method)) == shape(getattr(torch.optim.SGD, method))


@each
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_dtypes_and_storage_are_kept(name, options, dtype):
    model, optimizer = pair(name, dtype=dtype, **options)
    start = weights(model)
    before = [(p, p.data_ptr(), p.dtype, p.stride()) for p in model.parameters()]
    for x, labels in in_dtype(STREAM[:3], dtype):
        cross_entropy(labels)(model(x)).backward()
        grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
        optimizer.step()
        for p, (grad, value) in zip(model.parameters(), grads, strict=True):
            assert p.grad is grad
            assert torch.equal(grad, value)
        optimizer.zero_grad()
    for p, (old, pointer, kind, stride) in zip(model.parameters(), before, strict=True):
        assert p is old
        assert (p.data_ptr(), p.dtype, p.stride()) == (pointer, kind, stride)
    assert all(not torch.equal(value, start[key]) for key, value in weights(model).items())


@each
def test_foreach_or_not_is_the_same(name):
    found = []
    for foreach in (None, True, False):
        model, optimizer = pair(name, dtype=torch.float64, foreach=foreach)
        train(model, optimizer, batches(5))
        found.append(weights(model))
    for other in found[1:]:
        for key, value in other.items():
            torch.testing.assert_close(value, found[0][key], rtol=1e-12, atol=1e-14)


@each
def test_maximize_is_descent_on_the_negative(name):
    model, optimizer = pair(name, maximize=True)
    twin, other = pair(name)
    for x, labels in STREAM:
        cross_entropy(labels)(model(x)).backward()
        (-cross_entropy(labels)(twin(x))).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert_same(weights(model), weights(twin))


@each
def test_closure_comes_first_with_gradients(name):
    model, optimizer = pair(name)
    twin, other = pair(name)
    for x, labels in STREAM:

        def closure(x=x, labels=labels):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = cross_entropy(labels)(model(x))
            loss.backward()
            return loss

        expected = cross_entropy(labels)(twin(x))
        with torch.no_grad():
            assert torch.equal(optimizer.step(closure), expected)
        expected.backward()
        assert other.step() is None
        other.zero_grad()
    assert_same(weights(model), weights(twin))


@each
def test_step_hooks_run(name):
    model, optimizer = pair(name)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, STREAM[:1])
    assert seen == ["before", "after"]


@each
def test_parameters_without_gradient_or_numbers_are_passed_over(name):
    model, optimizer = pair(name)
    model[4].register_parameter("hollow", nn.Parameter(torch.ones(0, 3)))
    optimizer.add_param_group({"params": [model[4].hollow]})
    before = weights(model)
    optimizer.step()
    assert_same(weights(model), before)
    for p in (*model[0].parameters(), model[4].hollow):
        p.grad = torch.ones_like(p)
    optimizer.step()
    now = weights(model)
    for key in before:
        assert torch.equal(now[key], before[key]) == (not key.startswith("0.")), key


@each
@pytest.mark.parametrize("foreach", [True, False])
def test_sparse_gradients_are_refused_before_anything_moves(name, foreach):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(5, 3, sparse=True))
    optimizer = MAKERS[name](model, foreach=foreach)
    model[3](torch.tensor([1])).sum().backward()
    model[0](torch.ones(1, 2)).sum().backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"'3\.weight' has a gradient of layout torch\.sparse_coo.*sparse=False"):
        optimizer.step()
    assert_same(weights(model), before)


@each
def test_a_tensor_learning_rate_and_one_cycle(name):
    model, optimizer = pair(name, lr=torch.tensor(0.05))
    twin, other = pair(name, lr=0.05)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8) for o in (optimizer, other)]
    key = "momentum" if name == "agc-sgd" else "betas"
    seen = set()
    for batch in STREAM:
        train(model, optimizer, [batch])
        train(twin, other, [batch])
        for scheduler in schedulers:
            scheduler.step()
        seen.add(other.param_groups[0][key])
    assert len(seen) > 3
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@each
def test_grad_scaler_unscales_and_skips(name):
    model, optimizer = pair(name)
    twin, other = pair(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, (x, labels) in enumerate(STREAM):
        scaler.scale(cross_entropy(labels)(model(x))).backward()
        if i == 2:
            model[0].bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train(twin, other, [batch for i, batch in enumerate(STREAM) if i != 2])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@each
def test_accelerate(name):
    model, optimizer = pair(name)
    twin, other = pair(name)
    wrapped, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    for x, labels in STREAM:
        cross_entropy(labels)(wrapped(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))


# ---------------------------------------------------------------------------------------- state


@each
@pytest.mark.parametrize("stop", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resume_is_never_having_stopped(name, stop, dtype):
    """The second optimizer is made with defaults: options come from the checkpoint, what is excluded does not."""
    stream = in_dtype(STREAM, dtype)
    whole, whole_optimizer = pair(name, dtype=dtype)
    train(whole, whole_optimizer, stream)
    first, optimizer = pair(name, dtype=dtype)
    train(first, optimizer, stream[:stop])
    file = io.BytesIO()
    torch.save([first.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = build(dtype)
    resumed = CLASSES[name](second, exclude=optimizer.exclude)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    kinds = {k: v.dtype for k, v in optimizer.state[first[0].weight].items()}
    assert {k: v.dtype for k, v in resumed.state[second[0].weight].items()} == kinds
    train(second, resumed, stream[stop:])
    assert_same(weights(second), weights(whole))


@each
def test_loading_takes_copies(name):
    model, optimizer = pair(name)
    train(model, optimizer, STREAM[:2])
    saved = optimizer.state_dict()
    other_model, other = pair(name)
    other.load_state_dict(saved)
    train(model, optimizer, STREAM[2:])
    still = copy.deepcopy(other.state_dict()["state"])
    train(other_model, other, STREAM[:1])
    for i, state in other.state_dict()["state"].items():
        for key, value in state.items():
            assert not torch.equal(value, still[i][key]), key
            assert value.data_ptr() != saved["state"][i][key].data_ptr()


@each
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "optimizer first"])
def test_copies_go_on_by_themselves(name, how):
    model, optimizer = pair(name)
    train(model, optimizer, STREAM[:2])
    if how == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    elif how == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        other, twin = copy.deepcopy((optimizer, model))
    still = weights(twin)
    train(model, optimizer, STREAM[2:])
    assert_same(weights(twin), still)
    train(twin, other, STREAM[2:])
    assert_same(weights(twin), weights(model))
    assert other.excluded == optimizer.excluded != ()
    twin.append(nn.Linear(3, 3))
    other.add_param_group({"params": twin[5].parameters()})
    assert repr(other)


OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*single process")
@each
@pytest.mark.parametrize("stop", [0, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_distributed_checkpoint_round_trip(name, options, stop, tmp_path):
    """Both sides may be fresh: DCP then takes a step of zero gradients at lr 0, which must not count."""
    whole, whole_optimizer = pair(name)
    train(whole, whole_optimizer, STREAM)
    first, optimizer = pair(name)
    train(first, optimizer, STREAM[:stop])
    model_state, optimizer_state = get_state_dict(first, optimizer, options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path, no_dist=True)
    second, resumed = pair(name)
    with torch.no_grad():
        for p in second.parameters():
            p.add_(1.0)
    model_state, optimizer_state = get_state_dict(second, resumed, options=options)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        second, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
    )
    train(second, resumed, STREAM[stop:])
    assert_same(weights(second), weights(whole))


@each
def test_replaced_parameters_keep_their_treatment(name):
    """Accelerate and FSDP2 put other objects into groups and modules after the optimizer was made."""
    model, optimizer = pair(name)
    twin, other = pair(name)
    swapped = {id(p): nn.Parameter(p.detach().clone()) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [swapped[id(p)] for p in group["params"]]
    for module in model.modules():
        for key, p in list(module._parameters.items()):
            module._parameters[key] = swapped[id(p)]
    train(model, optimizer, STREAM)
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))


# ------------------------------------------------------------------------- groups and what is apart


@each
def test_groups_have_options_of_their_own(name):
    model, twin = build(), build()
    own = {"lr": 0.02, "weight_decay": 0.0}
    parts = [[*model[0].parameters(), *model[4].parameters()], list(model[2].parameters()), []]
    kept = {"exclude": ["0.weight", "2.bias"], "model": model}
    optimizer = CLASSES[name]([{"params": parts[0]}, {"params": parts[2]}], lr=0.1, weight_decay=0.2, **kept)
    optimizer.add_param_group({"params": parts[1], **own})
    assert optimizer.excluded == ("0.weight", "2.bias")
    kept = {"exclude": ["0.weight", "2.bias"], "model": twin}
    others = [
        CLASSES[name]([*twin[0].parameters(), *twin[4].parameters()], lr=0.1, weight_decay=0.2, **kept),
        CLASSES[name](twin[2].named_parameters(prefix="2"), **own, **kept),
    ]
    for x, labels in STREAM:
        train(model, optimizer, [(x, labels)])
        cross_entropy(labels)(twin(x)).backward()
        for other in others:
            other.step()
        twin.zero_grad()
    assert_same(weights(model), weights(twin))


@each
def test_excluded_by_name_pattern_module_and_rule(name):
    model = build()
    model.tied = model[2].weight  # a second name of the same weight

    def excluded(exclude):
        return MAKERS[name](model, exclude=exclude).excluded

    assert excluded(()) == ()
    assert excluded("tied") == excluded("2.weight") != ()
    assert excluded(model[4]) == ("4.weight", "4.bias")
    assert excluded(n for n in ["*.bias", "0"]) == ("0.weight", "0.bias", "2.bias", "4.bias")
    assert excluded(lambda n, p: n == "0.bias" and p is model[0].bias) == ("0.bias",)
    assert "excluded: 0.weight, 0.bias" in repr(MAKERS[name](model, exclude="0"))


@each
def test_what_cannot_be_excluded_is_an_error(name):
    model, make = build(), CLASSES[name]
    with pytest.raises(ValueError, match=r"'hed' matches no parameter; the model has 0\.weight"):
        make(model, exclude=["0", "hed"])
    with pytest.raises(TypeError, match=r"without a model.*model=model"):
        make(model.parameters(), exclude="0")
    with pytest.raises(ValueError, match=r"\(2,\) are not in the model"):
        make([nn.Parameter(torch.ones(2))], model=model)
    with pytest.raises(ValueError, match="two models"):
        make(model, model=build())
    with pytest.raises(TypeError, match="model='m'"):
        make(model.parameters(), model="m")
    optimizer = make(model[0].parameters(), model=model)
    with pytest.raises(ValueError, match="not in the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    train(model, optimizer, STREAM[:1])  # as if nothing had been asked
    assert len(optimizer.param_groups) == 1


@each
def test_groups_changed_behind_its_back_are_refused(name):
    _, optimizer = pair(name)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match=r"has 5 parameters and had 6.*add_param_group"):
        optimizer.step()


@each
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, r"lr=-1\.0: lr must be a finite number ≥ 0; start from"),
        ({"lr": torch.ones(2)}, "lr=tensor"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"eps": 0.0}, r"eps=0\.0"),
        ({"maximize": 1}, "maximize=1: maximize must be True or False"),
        ({"foreach": "yes"}, "foreach='yes'"),
    ],
)
def test_wrong_options_are_refused_in_every_group(name, options, said):
    model = build()
    with pytest.raises(ValueError, match=said):
        CLASSES[name](model, **options)
    with pytest.raises(ValueError, match=said):
        CLASSES[name]([{"params": model.parameters(), **options}], model=model)
