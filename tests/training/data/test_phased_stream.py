"""A stream of several phases: the batches of each stream for its steps, from any step on after a resume."""

import pytest
import torch

from torch_thor.training import UserError
from torch_thor.training.data import MemoryLoader, PhasedStream, TrainingOrder, TrainingStream, epoch_order

SEED = 5


def stream(count, batch_size, epoch=0):
    order = TrainingOrder(count, batch_size, SEED)
    return TrainingStream(MemoryLoader(torch.arange(count), order), order, epoch)


def phased():
    return PhasedStream([(5, stream(7, 3)), (2, stream(20, 8, epoch=3)), (1, stream(7, 1, epoch=4))])


def drawn(batches, number=None):
    taken = []
    while number is None or len(taken) < number:
        batch = next(batches, None)
        if batch is None:
            return taken
        taken.append(batch.tolist())
    return taken


def test_batches_by_hand():
    small = [epoch_order(7, SEED, epoch).tolist() for epoch in range(5)]
    large = epoch_order(20, SEED, 3).tolist()
    expected = [
        small[0][:3], small[0][3:6], small[1][:3], small[1][3:6], small[2][:3],
        large[:8], large[8:16],
        small[4][:1],
    ]  # fmt: skip
    assert drawn(phased().endless()) == expected
    assert len(phased()) == 8


@pytest.mark.parametrize("taken", range(1, 9))
def test_a_resumed_stream_goes_on(taken):
    whole = drawn(phased().endless())
    before = phased()
    assert drawn(before.endless(), taken) == whole[:taken]
    after = phased()
    after.load_state_dict(before.state_dict())
    assert drawn(after.endless()) == whole[taken:]


def test_a_phase_that_is_over_lets_its_loader_go():
    own = phased()
    batches = own.endless()
    drawn(batches, 5)
    assert own.streams[0] is not None  # a checkpoint of the last step of a phase needs it
    drawn(batches, 1)
    assert own.streams[0] is None


def test_a_checkpoint_of_other_phases_is_refused():
    own = PhasedStream([(4, stream(7, 3)), (3, stream(20, 8))])
    with pytest.raises(UserError, match=r"the checkpoint's phases have \[5, 2, 1\] steps, this run's \[4, 3\]"):
        own.load_state_dict(phased().state_dict())
    with pytest.raises(UserError, match=r"the checkpoint's phases have no steps, this run's \[4, 3\]"):
        own.load_state_dict(stream(7, 3).state_dict())
    other = PhasedStream([(5, stream(7, 2)), (2, stream(20, 8)), (1, stream(7, 1))])
    with pytest.raises(UserError, match="the checkpoint's data has batch_size=3, this run batch_size=2"):
        other.load_state_dict(phased().state_dict())
