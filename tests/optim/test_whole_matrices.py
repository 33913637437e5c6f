"""How matrices are dealt out to the processes that orthogonalise them, and the option that asks for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_thor import THOR, Distributed
from torch_thor.distributed.whole import deal_out


@given(
    sides=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), max_size=9),
    processes=st.integers(1, 5),
)
def test_every_matrix_has_one_owner(sides, processes):
    found = deal_out(tuple(sides), 4, processes)
    assert sorted(i for of_process in found for i in of_process) == list(range(len(sides)))


def test_the_largest_come_first():
    """Costs 900, 500, 400 and 100: one process inverts the first, the other the two next, and the last goes to it."""
    sides = ((1, 10, 90), (1, 10, 50), (1, 10, 40), (1, 10, 10))
    assert deal_out(sides, 1, 2) == ((0, 3), (1, 2))


def test_it_is_an_option_of_thor_muon():
    for value in (True, "yes"):
        with pytest.raises(ValueError, match=rf"whole_matrices={value!r}"):
            THOR(nn.Linear(2, 2), distributed=Distributed(whole_matrices=value))
