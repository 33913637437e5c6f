"""Step times in turns: what is counted, for whom, and what stays outside of it."""

import torch
from torch import nn

from torch_thor.bench import median_ratio, take_turns, training_step


class Clock:
    """Moves on when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def test_steps_take_turns_after_a_warm_up():
    clock, order = Clock(), []

    def step(name, seconds):
        def run():
            order.append(name)
            clock.passes(seconds if order.count("batch") > 1 else 50)

        return run

    def prepare():
        order.append("batch")
        clock.passes(100)

    steps = {"sgd": step("sgd", 1.0), "thor": step("thor", 2.0)}
    seconds = take_turns(steps, 3, warm_up=1, prepare=prepare, clock=clock)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 4
    assert all(one[0] == "batch" and {*one[1:]} == {"sgd", "thor"} for one in rounds)
    assert seconds == {"sgd": [1.0] * 3, "thor": [2.0] * 3}


def test_no_step_always_follows_the_same_one():
    order = []
    take_turns({name: lambda name=name: order.append(name) for name in "abc"}, 20, warm_up=0)
    pairs = {(x, y) for i in range(0, 60, 3) for x, y in zip(order[i : i + 2], order[i + 1 : i + 3], strict=True)}
    assert pairs == {(x, y) for x in "abc" for y in "abc" if x != y}


def test_a_step_may_count_for_another_name():
    clock, taken = Clock(), []

    def thor():
        taken.append(None)
        clock.passes(5 if len(taken) % 2 else 1)

    def name_of(name):
        return "refresh" if name == "thor" and len(taken) % 2 else name

    seconds = take_turns({"thor": thor, "sgd": lambda: clock.passes(2)}, 4, name_of=name_of, clock=clock)
    assert seconds == {"thor": [1, 1], "sgd": [2, 2, 2, 2], "refresh": [5, 5]}


def test_a_ratio_is_taken_within_a_round():
    assert median_ratio([2.0, 40.0, 4.0], [1.0, 10.0, 4.0]) == 2.0  # of 2, 4 and 1, however slow the second round was


def test_a_training_step_is_whole():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    step = training_step(lambda: model(torch.ones(1, 2)).sum(), torch.optim.SGD(model.parameters(), lr=0.25))
    step()
    step()
    assert model.weight.tolist() == [[0.5, 0.5]]  # twice a gradient of ones: it was set to zero in between
    assert model.weight.grad is None
