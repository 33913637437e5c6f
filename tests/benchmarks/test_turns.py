"""Step times in turns: what is counted, for whom, and what stays outside of it."""

import torch
from torch import nn

from benchmarks.runner.timing import median_ratio, state_bytes, take_turns, training_step


class Clock:
    """Moves on when it is told to."""

    now = 0.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def test_steps_take_turns_after_a_warm_up_and_may_count_for_another_name():
    clock, order = Clock(), []

    def step(name):
        order.append(name)
        clock.passes(
            50
            if order.count("batch") == 1
            else 5
            if name == "thor" and order.count("thor") % 2
            else 1
        )

    def prepare():
        order.append("batch")
        clock.passes(100)

    seconds = take_turns(
        {"sgd": lambda: step("sgd"), "thor": lambda: step("thor")}, 4, prepare=prepare, clock=clock,
        name_of=lambda name: "refresh" if name == "thor" and order.count("thor") % 2 else name,
    )  # fmt: skip
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 5
    assert all(one[0] == "batch" and {*one[1:]} == {"sgd", "thor"} for one in rounds)
    assert seconds == {"sgd": [1.0] * 4, "thor": [1.0] * 2, "refresh": [5.0] * 2}


def test_no_step_always_follows_the_same_one():
    order = []
    take_turns({name: lambda name=name: order.append(name) for name in "abc"}, 20, warm_up=0)
    pairs = {
        (x, y)
        for i in range(0, 60, 3)
        for x, y in zip(order[i : i + 2], order[i + 1 : i + 3], strict=True)
    }
    assert pairs == {(x, y) for x in "abc" for y in "abc" if x != y}


def test_a_ratio_is_taken_within_a_round():
    # of 2, 4 and 1, however slow the second round was
    assert median_ratio([2.0, 40.0, 4.0], [1.0, 10.0, 4.0]) == 2.0


def test_a_training_step_is_whole_and_its_state_is_counted():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    step = training_step(lambda: model(torch.ones(1, 2)).sum(), optimizer)
    step()
    step()
    # gradients of ones, momentum of 1 and 1.5: set to zero in between
    assert model.weight.tolist() == [[0.375, 0.375]]
    assert model.weight.grad is None
    assert state_bytes(optimizer) == 8
