"""The number of loss terms of a pass, where all calls agree on it."""

import random

from torch_thor.capture.backward_pass import _terms_of
from torch_thor.capture.loss_terms import Call, loss_terms_of_pass


def test_calls_that_agree_are_counted_as_the_rule_counts_them():
    """The backward pass asks the rule only where calls differ; what it says of others must be what the rule says."""
    generator, asked = random.Random(0), 0
    for _ in range(2000):
        calls = []
        for layer in range(generator.randint(1, 4)):
            dims = tuple(generator.choice([1, 3, 5]) for _ in range(generator.randint(0, 2)))
            terms = dims[0] if dims and generator.random() < 0.7 else 3
            certain, embedding = (generator.random() < 0.2 for _ in range(2))
            calls.append(Call(layer, terms, dims, certain, embedding))
        assert _terms_of(calls) == loss_terms_of_pass(calls)
        asked += len({call.loss_terms for call in calls}) == 1
    assert asked > 500
