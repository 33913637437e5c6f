"""How matrices are dealt out to the processes that orthogonalise them."""

from hypothesis import given
from hypothesis import strategies as st

from torch_thor.distributed.whole import deal_out


@given(
    sides=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), max_size=9),
    processes=st.integers(1, 5),
)
def test_every_matrix_has_one_owner_and_the_largest_come_first(sides, processes):
    found = deal_out(tuple(sides), 4, processes)
    assert sorted(i for of_process in found for i in of_process) == list(range(len(sides)))
    # costs 900, 500, 400 and 100: one process inverts the first, the other the two next, and the last goes to it
    assert deal_out(((1, 10, 90), (1, 10, 50), (1, 10, 40), (1, 10, 10)), 1, 2) == ((0, 3), (1, 2))
