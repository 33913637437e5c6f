"""Schedules against values worked out by hand: 10 steps an epoch, 4 epochs, 40 steps."""

import pytest
import torch

from torch_thor.training import Run, RunConfig, ScheduleSpec, UserError
from torch_thor.training.config.schedules import factor
from torch_thor.training.data import DataBundle
from torch_thor.training.engine.schedule_step import apply, check
from torch_thor.training.tasks import ImageClassification


@pytest.mark.parametrize(
    ("spec", "step", "expected"),
    [
        (ScheduleSpec("constant"), 39, 1.0),
        (ScheduleSpec("linear"), 0, 1.0),
        (ScheduleSpec("linear"), 10, 0.75),
        (ScheduleSpec("linear", final=0.2), 20, 0.6),
        (ScheduleSpec("cosine"), 0, 1.0),
        (ScheduleSpec("cosine"), 20, 0.5),
        (ScheduleSpec("cosine"), 30, (1 - 2**-0.5) / 2),  # cos(3π/4) = -1/√2
        (ScheduleSpec("cosine", final=0.1), 20, 0.55),
        (ScheduleSpec("exponential", rate=0.5), 20, 0.25),
        (ScheduleSpec("exponential", rate=0.5), 5, 2**-0.5),
        (ScheduleSpec("cosine", warmup_epochs=0.5), 0, 0.2),
        (ScheduleSpec("cosine", warmup_epochs=0.5), 4, 1.0),
        (ScheduleSpec("cosine", warmup_epochs=0.5), 5, 1.0),
        (ScheduleSpec("linear", warmup_epochs=2), 30, 0.5),
        (ScheduleSpec("exponential", rate=0.5, warmup_epochs=1), 20, 0.5),
        (ScheduleSpec("constant", warmup_epochs=2), 4, 0.25),
        (ScheduleSpec("linear", horizon_epochs=5), 30, 0.4),  # 30 of 50 steps
        (ScheduleSpec("cosine", horizon_steps=80), 20, (1 + 2**-0.5) / 2),  # cos(π/4) = 1/√2
        (ScheduleSpec("polynomial"), 10, 0.75),
        (ScheduleSpec("polynomial", power=2), 0, 1.0),
        (ScheduleSpec("polynomial", power=2), 10, 0.5625),
        (ScheduleSpec("polynomial", power=2, final=0.2), 10, 0.65),  # 0.2 + 0.8 · 0.5625
        (ScheduleSpec("polynomial", power=2, warmup_epochs=2), 30, 0.25),
        (ScheduleSpec("polynomial", power=0.5, horizon_epochs=16), 0, 1.0),
        (ScheduleSpec("step", milestones=(1, 3)), 9, 1.0),
        (ScheduleSpec("step", milestones=(1, 3)), 10, 0.1),
        (ScheduleSpec("step", milestones=(1, 3)), 29, 0.1),
        (ScheduleSpec("step", milestones=(1, 3), gamma=0.5), 30, 0.25),
        (ScheduleSpec("step", milestones=(0.5,)), 5, 0.1),
        (ScheduleSpec("step", milestones=(1, 3), warmup_epochs=2), 9, 0.5),  # 10 of 20 warm-up steps
        (ScheduleSpec("step", milestones=(1, 3), warmup_epochs=2), 10, 0.055),  # milestones do not wait for warm-up
        (ScheduleSpec("thor-lr"), 19, 0.5),  # counted from 1: after the 20th step e = 2 of 4
        (ScheduleSpec("thor-lr"), 39, 0.0),
        (ScheduleSpec("thor-lr", decay=2, horizon_epochs=8), 39, 0.25),
        (ScheduleSpec("thor-lr", horizon_steps=80, decay_epochs=1), 8, 0.8875),  # e = 0.9 of 8
        (ScheduleSpec("thor-lr", horizon_steps=80, decay_epochs=1), 9, 0.4375),  # 7/8, halved
        (ScheduleSpec("thor-lr", horizon_steps=80, decay_epochs=1), 19, 0.1875),  # 6/8, halved twice
        (ScheduleSpec("thor-lr", horizon_steps=80, decay_epochs=1), 39, 0.125),  # and never a third time
        (ScheduleSpec("thor-lr", horizon_epochs=8, warmup_epochs=2), 9, 0.4375),  # 7/8, half of the warm-up
        (ScheduleSpec("thor-damping", rate=0.0625), 24, 0.5),  # e = 2.5, a quarter of ten epochs: 16^(-1/4)
        (ScheduleSpec("thor-damping", rate=0.0625, warmup_epochs=4), 24, 0.3125),
    ],
)
def test_factor_by_hand(spec, step, expected):
    assert factor(spec, step, steps_per_epoch=10, total_steps=40) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kind": "cosin"}, r"cosin .*thor-lr, thor-damping"),
        ({"warmup_epochs": -1}, "-1"),
        ({"warmup_epochs": float("inf")}, "warmup_epochs=inf"),
        ({"final": 2}, "final=2"),
        ({"final": float("nan")}, "final=nan"),
        ({"rate": 0}, "rate=0"),
        ({"end": -1e-6}, "end=-1e-06"),
        ({"end": 1e-6, "final": 0.1}, "give one"),
        ({"power": 0}, "power=0"),
        ({"decay": -2}, "decay=-2"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"milestones": (30, 30)}, r"milestones=\[30, 30\] must be positive and increasing"),
        ({"milestones": (0, 30)}, r"milestones=\[0, 30\] must be positive and increasing"),
        ({"kind": "step"}, "needs milestones"),
        ({"decay_epochs": -1}, "decay_epochs=-1"),
        ({"horizon_epochs": 0}, "horizon_epochs=0"),
        ({"horizon_steps": -5}, "horizon_steps=-5"),
        ({"horizon_epochs": 4, "horizon_steps": 40}, "give one"),
    ],
)
def test_wrong_schedules_are_refused(values, named):
    with pytest.raises(UserError, match=named):
        ScheduleSpec(**values)


def sgd(**settings):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1, **settings}])


def set_at(spec, key, initial, step, steps_per_epoch, total_steps):
    optimizer = sgd(**{key: initial})
    apply(optimizer, key, spec, step, steps_per_epoch, total_steps)
    return optimizer.param_groups[0][key]


# 8 devices with 32 images each: 5004 steps an epoch, 45 epochs; E 53, halved from epoch 39 and again from 40.
# (1 - e / 53)^4.0839 and 0.50036^(e / 10) were worked out with 40 decimal digits.
RESNET50 = [
    (1, 0.0580291064230158, 0.0299995848785078),
    (2502, 0.0558265674786074, 0.0289791327223692),
    (5004, 0.0536869091732382, 0.0279930044446897),
    (195155, 0.0002526852831370, 0.0020152519092096),  # the last step of full size
    (195156, 0.0001263352767176, 0.0020152240233969),  # e = 39
    (200159, 0.0000933496882436, 0.0018804318550558),
    (200160, 0.0000466719140359, 0.0018804058347999),  # e = 40
    (225180, 0.0000064261602772, 0.0013301263042177),  # e = 45, the last one
]


@pytest.mark.parametrize(("t", "lr", "damping"), RESNET50)
def test_resnet50_with_thor_by_hand(t, lr, damping):
    lrs = ScheduleSpec("thor-lr", decay=4.0839, decay_epochs=39, horizon_epochs=53)
    dampings = ScheduleSpec("thor-damping", rate=0.50036)
    assert set_at(lrs, "lr", 0.05803, t - 1, 5004, 45 * 5004) == pytest.approx(lr, abs=1e-16, rel=1e-12)
    assert set_at(dampings, "damping", 0.03, t - 1, 5004, 45 * 5004) == pytest.approx(damping, abs=1e-16, rel=1e-12)


# To 1e-6 over 30,000 steps, of which 3,000 are taken; t = 3000: 1e-6 + 0.006463 · 0.9^2, 1e-6 + 0.007034 · 0.9^4.
BERT = [
    (0, 0.006464, 0.007035),
    (1, 0.006463569140514444, 0.007034062180225625),
    (1000, 0.006040314444444444, 0.006142993276543210),
    (3000, 0.00523603, 0.0046160074),
    (15000, 0.00161675, 0.000440625),
]


@pytest.mark.parametrize(("step", "lr", "damping"), BERT)
def test_bert_with_thor_by_hand(step, lr, damping):
    lrs = ScheduleSpec("polynomial", power=2, end=1e-6, horizon_steps=30_000)
    dampings = ScheduleSpec("polynomial", power=4, end=1e-6, horizon_steps=30_000)
    assert set_at(lrs, "lr", 0.006464, step, 1000, 20_000) == pytest.approx(lr, rel=1e-12)
    assert set_at(dampings, "damping", 0.007035, step, 1000, 20_000) == pytest.approx(damping, rel=1e-12)


def test_apply_starts_from_the_first_value_and_leaves_other_groups_alone():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1, "damping": 2.0}])
    for _ in range(3):
        apply(optimizer, "lr", ScheduleSpec("linear"), 20, 10, 40)
        apply(optimizer, "damping", ScheduleSpec("exponential", rate=0.5), 20, 10, 40)
    first, second = optimizer.param_groups
    assert (first["lr"], second["lr"], second["damping"]) == (0.2, 0.05, 0.5)
    assert "damping" not in first


@pytest.mark.parametrize(
    ("kind", "expected"), [("linear", (0.22, 0.07)), ("cosine", (0.22, 0.07)), ("polynomial", (0.13, 0.055))]
)
def test_end_is_one_value_for_all_groups(kind, expected):
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.4}, {"params": [b], "lr": 0.1}])
    apply(optimizer, "lr", ScheduleSpec(kind, end=0.04, power=2), 20, 10, 40)  # half way, from lr to 0.04
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)


UNFIT = [
    (
        "lr",
        {"kind": "thor-lr", "horizon_epochs": 3.9},
        r"schedule\.horizon_epochs=3\.9 is shorter .*4 epochs.*raise it",
    ),
    ("lr", {"kind": "polynomial", "horizon_steps": 39}, r"schedule\.horizon_steps=39 is shorter .*40 steps"),
    ("lr", {"kind": "cosine", "horizon_epochs": 1}, r"schedule\.horizon_epochs=1 is shorter"),
    ("lr", {"kind": "linear", "horizon_epochs": 1}, r"schedule\.horizon_epochs=1 is shorter"),
    ("damping", {"kind": "thor-lr", "horizon_epochs": 3}, r"damping_schedule\.horizon_epochs=3 is shorter"),
    ("damping", {"kind": "thor-lr", "horizon_epochs": 4}, r"damping_schedule: thor-lr sets damping to 0"),
    ("lr", {"kind": "constant", "warmup_epochs": 4.5}, r"schedule\.warmup_epochs=4\.5 is longer .*4 epochs"),
    ("lr", {"kind": "polynomial", "end": 0.2}, r"schedule\.end=0\.2 is above the initial lr=0\.1"),
]


@pytest.mark.parametrize(("key", "values", "said"), UNFIT)
def test_schedules_that_do_not_fit_the_training_are_refused(key, values, said):
    with pytest.raises(UserError, match=said) as caught:
        check(sgd(damping=0.03), key, ScheduleSpec(**values), steps_per_epoch=10, total_steps=40)
    assert "\n" not in str(caught.value)


FIT = [
    ("lr", {"kind": "thor-lr", "horizon_epochs": 4}),
    ("lr", {"kind": "thor-lr"}),
    ("lr", {"kind": "polynomial", "horizon_steps": 40}),
    ("lr", {"kind": "exponential", "rate": 0.5, "horizon_epochs": 1}),  # it has no horizon
    ("lr", {"kind": "step", "milestones": (30, 60)}),
    ("lr", {"kind": "linear", "end": 0.1, "warmup_epochs": 4}),
    ("damping", {"kind": "linear"}),  # the last step is not yet at 0
    ("damping", {"kind": "thor-lr", "horizon_epochs": 4.1}),
    ("damping", {"kind": "thor-damping", "rate": 0.5}),
]


@pytest.mark.parametrize(("key", "values"), FIT)
def test_schedules_that_fit_stay_above_zero_to_the_end(key, values):
    spec = ScheduleSpec(**values)
    check(sgd(damping=0.03), key, spec, steps_per_epoch=10, total_steps=40)
    seen = [factor(spec, step, 10, 40) for step in range(40)]
    assert all(0 < value <= 1 for value in seen[:-1])
    assert seen[-1] >= 0


@pytest.mark.parametrize(("key", "kind"), [("schedule", "thor-lr"), ("damping_schedule", "polynomial")])
def test_a_run_refuses_a_short_schedule_before_its_first_step(key, kind):
    data = DataBundle(torch.randn(10, 4), torch.randint(3, (10,)), torch.randn(6, 4), torch.randint(3, (6,)), 3)
    model = torch.nn.Linear(4, 3)
    config = RunConfig(epochs=3, batch_size=5, **{key: ScheduleSpec(kind, horizon_epochs=2)})
    with pytest.raises(UserError, match=rf"^{key}\.horizon_epochs=2 is shorter than the training \(3 epochs\)"):
        Run(model, torch.optim.SGD(model.parameters()), ImageClassification(data, config), config)
