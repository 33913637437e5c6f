"""Which process orthogonalises which matrix, where matrices are divided by rows and orthogonalised
as a whole.
"""

from hypothesis import given
from hypothesis import strategies as st

from torch_thor.distributed.whole import deal_out


@given(costs=st.lists(st.integers(1, 99), max_size=9), processes=st.integers(1, 5))
def test_every_matrix_has_one_owner_and_the_largest_come_first(costs, processes):
    found = deal_out(tuple(costs), processes)
    assert sorted(i for of_process in found for i in of_process) == list(range(len(costs)))
    # one process takes the first, the other the two next, and the last goes to the first
    assert deal_out((900, 500, 400, 100), 2) == ((0, 3), (1, 2))
