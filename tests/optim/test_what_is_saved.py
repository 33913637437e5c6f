"""What is saved can be loaded, by any of torch's readers and whoever has set the options."""

import copy
import io
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon, schedules

STREAM = batches(8)
OURS = {
    "THOR": lambda model, **options: THOR(model, **options),
    "ThorMuon": lambda model, **options: ThorMuon(model, **options),
    "LAMB": lambda model, **options: LAMB(model, **options),
    "AGCSGD": lambda model, **options: AGCSGD(model, **{"momentum": 0.9, **options}),
}
every_optimizer = pytest.mark.parametrize("make", OURS.values(), ids=OURS)


def loaded(value):
    """Through a file, as torch reads one by default."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(make, steps=3, **options):
    torch.manual_seed(1)
    model = mlp()
    optimizer = make(model, **options)
    train(model, optimizer, STREAM[:steps])
    return model, optimizer


def groups_of(optimizer):
    """As Lightning's BackboneFinetuning stores them."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def assert_train_alike(*pairs, stream=STREAM[3:]):
    """Models with their optimizers have the same weights after the same batches."""
    for pair in pairs:
        train(*pair, stream)
    for other, _ in pairs[1:]:
        assert_same(weights(pairs[0][0]), weights(other))


def as_numpy(value):
    if isinstance(value, bool | int | float):
        return np.asarray(value)[()]
    return type(value)(map(as_numpy, value)) if isinstance(value, tuple | list) else value


def as_tensors(value, dtype=torch.float64):
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=dtype if isinstance(value, float) else None)
    if isinstance(value, tuple | list):
        return type(value)(as_tensors(one, dtype) for one in value)
    return value


def as_float32(value):
    """As formats keep numbers that know tensors alone."""
    return as_tensors(value, torch.float32)


# ---- options -------------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("convert", [as_numpy, as_tensors])
def test_numbers_of_numpy_and_tensors_are_numbers(make, convert):
    """In the constructor, and in a group between two steps."""
    (model, optimizer), counters = trained(make), ("step", "next_refresh", "last_loss_terms")
    given = {
        name: convert(value)
        for name, value in groups_of(optimizer)[0].items()
        if name in optimizer.defaults and name not in ("auto_lr", "update_interval", *counters)
    }
    if isinstance(optimizer, ThorMuon):  # given, it counts as it is
        given.pop("lr")
    twin, other = trained(make, **given)
    other.param_groups[0].update(given)
    assert_train_alike((model, optimizer), (twin, other))


@every_optimizer
@pytest.mark.parametrize("convert", [as_numpy, as_tensors, as_float32])
def test_numbers_that_a_format_has_converted_are_loaded_as_they_were(make, convert):
    """RLlib and torch.distributed.checkpoint make tensors of numbers."""
    (model, optimizer), (twin, other) = trained(make), trained(make)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group.update({k: convert(value) for k, value in group.items() if k != "params"})
    exactly = as_tensors if convert is as_float32 else convert  # what was computed is no decimal
    for entries in saved["state"].values():
        entries.update({k: exactly(value) for k, value in entries.items()})
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), other.state_dict())
    assert_train_alike((model, optimizer), (twin, other))


@every_optimizer
def test_groups_hold_numbers_of_python_whoever_sets_them(make):
    model, optimizer = trained(make)
    LambdaLR(optimizer, lambda step: np.cos(step / 100))
    if isinstance(optimizer, THOR | ThorMuon):
        schedules.LambdaDamping(optimizer, lambda step: np.exp(np.float32(-step)))
    group = optimizer.param_groups[0]
    assert type(group["lr"]) is float
    group["lr"] = np.float32(0.5)
    assert group["lr"] == 0.5
    group.update(weight_decay=np.float64(0.25), lr=Fraction(1, 8))
    group |= {"lr": np.float64(0.125)}
    group["own"] = {"lr": np.float64(0.125), "more": [np.float64(2.0)]}  # a trainer's
    group.setdefault("lr_scale", np.float64(0.75))
    assert (group["lr"], group["weight_decay"], group["lr_scale"]) == (0.125, 0.25, 0.75)
    assert [type(group[k]) for k in ("lr", "weight_decay", "lr_scale")] == [float] * 3
    assert group["own"] == {"lr": 0.125, "more": [2.0]}
    assert loaded(groups_of(optimizer)) == groups_of(optimizer)
    # other code may put dicts of its own in the place of groups
    optimizer.param_groups[0] = {**group, "lr": np.float64(0.375)}
    assert loaded(optimizer.state_dict())["param_groups"][0]["lr"] == 0.375
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": np.float64(0.5)}
    train(model, optimizer, STREAM[3:4])
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_learning_rate_that_is_a_tensor_stays_one():
    """A scheduler changes it in place."""
    for make in (THOR, ThorMuon, LAMB, AGCSGD):
        lr = torch.tensor(0.25)
        optimizer = make(mlp(), lr=lr)
        assert optimizer.param_groups[0]["lr"] is lr
        other = make(mlp(), lr=torch.tensor(0.5))
        other.load_state_dict(loaded(optimizer.state_dict()))
        assert isinstance(other.param_groups[0]["lr"], torch.Tensor)
        assert float(other.param_groups[0]["lr"]) == 0.25


@pytest.mark.parametrize("value", [np.bool_(True), True, "0.1", None, np.array([0.1, 0.2]), 1j])
@every_optimizer
def test_what_is_no_number_is_refused(make, value):
    said = r"weight_decay=.*: weight_decay must be a finite number ≥ 0; 0 switches it off"
    with pytest.raises(ValueError, match=said):
        make(mlp(), weight_decay=value)
    model, optimizer = trained(make)
    optimizer.param_groups[0]["weight_decay"] = value
    with pytest.raises(ValueError, match=said):
        train(model, optimizer, STREAM[:1])


def test_what_lamb_and_agcsgd_refuse_to_load_they_do_not_save():
    for make, option, value, rule in (
        (OURS["AGCSGD"], "momentum", 1.0, r"in \[0, 1\)"),
        (OURS["AGCSGD"], "momentum", 1.5, r"in \[0, 1\)"),
        (OURS["AGCSGD"], "dampening", 2.0, r"in \[0, 1\]"),
        (OURS["LAMB"], "betas", (0.9, 1.0), "a pair"),
        (OURS["LAMB"], "lr", float("nan"), "a finite number"),
    ):
        model, optimizer = trained(make)
        before = optimizer.param_groups[0][option]
        with pytest.raises(ValueError, match=f"{option}=.* must be {rule}"):
            type(optimizer)(
                [{"params": [*mlp().parameters()], option: value}], model=None, exclude=()
            )
        optimizer.param_groups[0][option] = value
        for refused in (lambda: train(model, optimizer, STREAM[:1]), optimizer.state_dict):  # noqa: B023
            with pytest.raises(ValueError, match=f"{option}=.* must be {rule}"):
                refused()
        optimizer.param_groups[0][option] = before
        train(model, optimizer, STREAM[3:4])
        key = "exp_avg" if isinstance(optimizer, LAMB) else "momentum_buffer"
        optimizer.state[model[0].weight][key][0, 0] = torch.nan
        with pytest.raises(ValueError, match=f"NaN or inf in '{key}' of parameter '0.weight'"):
            optimizer.state_dict()


# ---- readers -------------------------------------------------------------------------------------


def test_a_process_without_this_package_reads_it(tmp_path):
    """State dicts, groups, and what a hook of state dicts saves, of all four."""
    saved = []

    def save(_, state_dict):
        saved.append(copy.copy(state_dict))

    for make in OURS.values():
        _, optimizer = trained(make)
        optimizer.param_groups[0]["lr"] = np.float64(0.0625)
        optimizer.register_state_dict_post_hook(save)
        saved += [optimizer.state_dict(), groups_of(optimizer)]
    torch.save(saved, tmp_path / "saved.pt")
    code = (
        "import sys, torch; found = torch.load(sys.argv[1], weights_only=True); "
        "assert not any(name.startswith('torch_thor') for name in sys.modules); "
        "print(len(found), found[3]['param_groups'][0]['update_interval'], "
        "{len(str(found[i])) for i in (0, 3)} == {len(str(found[i + 1])) for i in (0, 3)})"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "saved.pt"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    interval = {"kind": "geometric", "first": 1, "last": 50, "factor": 1.5}
    assert told.stdout.strip() == f"12 {interval} True"


# ---- what is missing, or of another form ---------------------------------------------------------


@every_optimizer
def test_an_option_that_is_missing_gets_its_default_and_is_told(make):
    """Every option of a group, one at a time; the training goes on as with it."""
    _, optimizer = trained(make)
    whole = optimizer.state_dict()
    for name in optimizer.defaults.keys() - {"differentiable", "step", "next_refresh"}:
        saved = copy.deepcopy(whole)
        value = saved["param_groups"][0].pop(name)
        model, other = trained(make, steps=0)
        with pytest.warns(
            UserWarning, match=f"of {type(other).__name__} has no {name} .* is taken"
        ):
            other.load_state_dict(saved)
        if name not in ("last_loss_terms", "lr"):
            assert other.state_dict()["param_groups"][0][name] == value
        train(model, other, STREAM[3:4])


@every_optimizer
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_number_in_a_tensor_is_judged_as_any_other(make, value):
    _, optimizer = trained(make)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["weight_decay"] = torch.tensor(value)
    with pytest.raises(ValueError, match=r"weight_decay=.*: weight_decay must be a finite number"):
        optimizer.load_state_dict(saved)


@every_optimizer
def test_a_later_form_is_refused(make):
    _, optimizer = trained(make)
    saved = optimizer.state_dict()
    assert saved["version"] == 1
    with pytest.raises(
        ValueError, match=r"has version 2: .* reads version 1; load it with the torch"
    ):
        optimizer.load_state_dict({**saved, "version": 2})
    optimizer.load_state_dict({k: v for k, v in saved.items() if k != "version"})


@pytest.mark.parametrize("make", [OURS["LAMB"], OURS["ThorMuon"]], ids=["LAMB", "ThorMuon"])
@pytest.mark.parametrize(
    "convert",
    [float, int, np.float64, lambda t: t.reshape(1), lambda t: t.long(), lambda t: t.double()],
)
def test_a_step_is_a_float32_tensor_on_the_cpu_whatever_was_saved(make, convert):
    """Resumed from numbers, as formats without tensors of no dimension keep it."""
    (model, optimizer), (twin, other) = trained(make), trained(make)
    saved = copy.deepcopy(optimizer.state_dict())
    counted = [entries for entries in saved["state"].values() if "step" in entries]
    assert counted
    for entries in counted:
        entries["step"] = convert(entries["step"])
    optimizer.load_state_dict(saved)
    for entries in optimizer.state.values():
        if "step" in entries:
            assert (entries["step"].dtype, entries["step"].shape) == (torch.float32, ())
            assert entries["step"].device.type == "cpu"
    assert_train_alike((model, optimizer), (twin, other))


@every_optimizer
def test_entries_that_are_no_numbers_or_tensors_are_refused_by_name(make):
    model, optimizer = trained(make)
    before = copy.deepcopy(optimizer.state_dict())
    keys = {key for entries in before["state"].values() for key in entries}
    for key in keys:
        for value in ("many", None, [1.0, 2.0], float("nan")):
            saved = copy.deepcopy(before)
            owner = next(i for i, entries in saved["state"].items() if key in entries)
            saved["state"][owner][key] = value
            with pytest.raises(ValueError, match=key):
                optimizer.load_state_dict(saved)
            assert_same(optimizer.state_dict(), before)
    train(model, optimizer, STREAM[3:4])


# ---- hooks ---------------------------------------------------------------------------------------


@every_optimizer
def test_what_a_load_hook_puts_stands(make):
    """The state, an option; and it sees a finished optimizer."""
    model, optimizer = trained(make)
    saved, seen = copy.deepcopy(optimizer.state_dict()), []

    def hook(one):
        seen.append(copy.deepcopy(one.state_dict()))
        for entries in one.state.values():
            for key in entries.keys() & {"momentum_buffer", "exp_avg"}:
                entries[key] = torch.zeros_like(entries[key])
        one.param_groups[0]["weight_decay"] = 0.5

    optimizer.register_load_state_dict_post_hook(hook)
    optimizer.load_state_dict(saved)
    assert_same(seen[0], saved)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    moments = [
        entries[key]
        for entries in optimizer.state.values()
        for key in entries.keys() & {"momentum_buffer", "exp_avg"}
    ]
    assert moments
    assert not any(moment.any() for moment in moments)
    train(model, optimizer, STREAM[3:4])


@every_optimizer
def test_a_group_must_be_a_dict(make):
    model = mlp()
    optimizer = make(model)
    before = len(optimizer.param_groups)
    for wrong in ([*mlp().parameters()], None, 3):
        with pytest.raises(
            TypeError, match=f'must be a dict, but got {type(wrong).__name__}: pass {{"params"'
        ):
            optimizer.add_param_group(wrong)
    assert len(optimizer.param_groups) == before
