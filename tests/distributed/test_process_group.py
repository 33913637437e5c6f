"""Which processes an optimizer trains with, in one process; that several do is told in the other files."""

import copy
import pickle

import pytest
import torch
from torch import distributed as dist
from torch_thor.distributed.process_group import ProcessGroupHandle

from tiny import assert_same, batches, mlp, train, weights
from torch_thor import THOR, Distributed


@pytest.mark.parametrize("wrong", [True, 0, 1, "gloo", [0, 1], dist.GroupMember.NON_GROUP_MEMBER], ids=repr)
def test_what_is_no_group_is_refused(wrong):
    with pytest.raises(ValueError, match=r"process_group=.*None for the default group, or False"):
        THOR(mlp(), distributed=Distributed(process_group=wrong))
    optimizer = THOR(mlp())
    with pytest.raises(ValueError, match="process_group="):
        optimizer.process_group = wrong
    assert optimizer.process_group is None


CPU = torch.device("cpu")
ALONE = ProcessGroupHandle(False).processes(CPU)


def test_without_a_group_a_process_has_no_others():
    assert (ALONE.count, ALONE.rank, ALONE.first) == (1, 0, True)


@pytest.mark.parametrize("group", [None, False])
def test_alone_without_a_default_group(group):
    assert ProcessGroupHandle(group).processes(CPU) is ALONE
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        assert copied(THOR(mlp(), distributed=Distributed(process_group=group))).process_group is group


def test_a_group_of_one_needs_nobody(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        assert ProcessGroupHandle().processes(CPU) is ALONE
        model, twin = mlp(), mlp()
        twin.load_state_dict(model.state_dict())
        train(model, THOR(model, distributed=Distributed(process_group=dist.group.WORLD)), batches(3))
        train(twin, THOR(twin, distributed=Distributed(process_group=False)), batches(3))
        assert_same(weights(model), weights(twin))
    finally:
        dist.destroy_process_group()


def test_it_is_the_programs_and_not_the_checkpoints():
    saved = THOR(mlp(), distributed=Distributed(process_group=False)).state_dict()
    assert "process_group" not in str(saved)
    optimizer = THOR(mlp())
    optimizer.load_state_dict(saved)
    assert optimizer.process_group is None
