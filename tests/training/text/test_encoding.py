"""Which sentences share an example."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torch_thor.training.text.encoding import spans


def test_an_example_ends_with_the_sentence_that_fills_it():
    assert spans([10, 20, 29], 32) == [(0, 3)]
    assert spans([10, 20, 28, 40, 50], 32) == [(0, 4), (3, 5)]  # the last sentence is not left alone
    assert spans([10, 20, 35, 40, 50], 32) == [(0, 3), (3, 5)]
    assert spans([], 32) == []


def test_an_example_has_two_sentences_if_the_document_has():
    assert spans([80, 85, 90, 170], 32) == [(0, 2), (2, 4)]
    assert spans([5, 80, 85], 32) == [(0, 2), (1, 3)]
    assert spans([80], 32) == spans([5], 32) == [(0, 1)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(16, 128))
def test_every_sentence_is_in_an_example_and_only_the_last_may_be_short(lengths, length):
    ends = np.cumsum(lengths)
    found = spans(ends, length)
    assert sorted({n for first, last in found for n in range(first, last)}) == list(range(len(lengths)))
    assert sum(last - first for first, last in found) <= len(lengths) + 1
    for first, last in found[:-1]:
        assert sum(lengths[first:last]) >= length - 3
        assert last - first == 2 or sum(lengths[first : last - 1]) < length - 3
    assert len(lengths) == 1 or all(last - first > 1 for first, last in found)
