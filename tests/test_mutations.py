"""The entries of mutations.py name expressions that are there; it shows itself which are caught."""

from pathlib import Path

import pytest

import torch_thor
from mutations import MUTATIONS
from nodes import Node, replaced

SOURCE = """
class Step:
    def take(self, weights, lr):
        for weight in weights:
            weight.add_(self.d, alpha=-lr / 2).mul_(1 - lr)
        return min(abs(max(lr, 0)), 1) if lr > 0 else self.take(max(weights, lr), 0)
"""


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_entry_names_one_expression(name):
    mutation = MUTATIONS[name]
    source = (Path(torch_thor.__file__).parent / mutation.file).read_text(encoding="utf-8")
    replaced(source, mutation.function, mutation.node, mutation.becomes)
    assert all((Path(__file__).parents[1] / test).exists() for test in mutation.tests)


def test_an_expression_becomes_another():
    for node, becomes, found in (
        (Node("call", "add_", argument=1), "-_", "weight.add_(-self.d, alpha="),
        (Node("call", "mul_"), "weight", "        weight\n"),
        (Node("call", "max", number=2, argument=2), "_ + 1", "max(weights, lr + 1)"),
        (Node("keyword", "alpha"), "2 * (_)", "alpha=2 * (-lr / 2)"),
        (Node("operator", ">"), "False", "1) if False else"),
        (Node("return"), "_, _", "return (min("),
        (Node("loop"), "_[:1]", "in weights[:1]:"),
    ):
        assert found not in SOURCE
        assert found in replaced(SOURCE, "Step.take", node, becomes)


def test_what_is_missing_or_ambiguous_is_an_error():
    for node in (
        Node("call", "sqrt"),
        Node("call", "max"),
        Node("call", "max", number=3),
        Node("call", "add_", argument=2),
    ):
        with pytest.raises(LookupError, match=r"Step\.take has|call add_ has 1 arguments"):
            replaced(SOURCE, "Step.take", node, "_")
    with pytest.raises(LookupError, match=r"there are 0 of Step\.go"):
        replaced(SOURCE, "Step.go", Node("return"), "_")
