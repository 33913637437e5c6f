"""How matrices are dealt out to the processes that orthogonalise them, and the option that asks for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_thor import THOR, Distributed
from torch_thor.distributed.whole import deal_out


@given(costs=st.lists(st.integers(1, 99), max_size=9), processes=st.integers(1, 5))
def test_every_matrix_has_one_owner(costs, processes):
    found = deal_out(tuple(costs), processes)
    assert sorted(i for of_process in found for i in of_process) == list(range(len(costs)))


def test_the_largest_come_first():
    """One process takes the first, the other the two next, and the last goes to the first."""
    assert deal_out((900, 500, 400, 100), 2) == ((0, 3), (1, 2))


def test_it_is_an_option_of_thor_muon():
    for value in (True, "yes"):
        with pytest.raises(ValueError, match=rf"whole_matrices={value!r}"):
            THOR(nn.Linear(2, 2), distributed=Distributed(whole_matrices=value))
