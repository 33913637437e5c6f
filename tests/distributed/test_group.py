"""`torch_thor.Distributed`: its checks, and which processes it means in one process."""

import dataclasses

import pytest
import torch
from torch import distributed as dist

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR, Distributed, ThorMuon

GROUPS = [True, 0, 1, "gloo", [0, 1], dist.GroupMember.NON_GROUP_MEMBER]


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("process_group", GROUPS, "default group, or False"),
        ("whole_matrices", ["yes", 1, None], "True or False"),
        (
            "communication_dtype",
            [torch.float16, "bfloat16"],
            "None, torch.bfloat16 or torch.float32",
        ),
    ],
)
def test_what_is_wrong_is_refused(name, values, rule):
    for value in values:
        with pytest.raises(ValueError, match=f"(?s)^{name}=.*: {name} must be .*{rule}"):
            Distributed(**{name: value})


def test_it_cannot_be_changed():
    optimizer = ThorMuon(mlp(), distributed=Distributed(whole_matrices=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.distributed.process_group = False
    with pytest.raises(AttributeError):
        optimizer.distributed = Distributed()


def test_a_group_of_one_needs_nobody(tmp_path):
    """The bits of no group."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        trained = []
        for group in (dist.group.WORLD, None, False):
            torch.manual_seed(0)
            model = mlp()
            optimizer = THOR(model, distributed=Distributed(process_group=group))
            train(model, optimizer, batches(3))
            trained.append((weights(model), optimizer.state_dict()))
    finally:
        dist.destroy_process_group()
    for one in trained:
        assert_same(one, trained[0])
