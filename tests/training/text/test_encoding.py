"""Which sentences share an example."""

from torch_thor.training.text.encoding import spans


def test_packing_is_greedy_and_leaves_long_sentences_alone():
    assert spans([10, 20, 29], 32) == [(0, 3)]
    assert spans([10, 20, 30], 32) == [(0, 2), (2, 3)]
    assert spans([5, 80, 85, 90], 32) == [(0, 1), (1, 2), (2, 4)]
    assert spans([], 32) == []
