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


@pytest.mark.parametrize(
    ("node", "becomes", "found"),
    [
        (Node("call", "add_", argument=1), "-_", "weight.add_(-self.d, alpha="),
        (Node("call", "mul_"), "weight", "        weight\n"),
        (Node("call", "max", number=2, argument=2), "_ + 1", "max(weights, lr + 1)"),
        (Node("keyword", "alpha"), "2 * (_)", "alpha=2 * (-lr / 2)"),
        (Node("operator", "/"), "lr", "alpha=lr)"),
        (Node("operator", ">"), "False", "1) if False else"),
        (Node("return"), "_, _", "return (min("),
        (Node("loop"), "_[:1]", "in weights[:1]:"),
    ],
)
def test_an_expression_becomes_another(node, becomes, found):
    assert found not in SOURCE
    assert found in replaced(SOURCE, "Step.take", node, becomes)


@pytest.mark.parametrize(
    ("function", "node", "said"),
    [
        ("Step.go", Node("return"), "there are 0 of Step.go"),
        ("Step.take", Node("call", "sqrt"), "Step.take has 0 of: call sqrt"),
        ("Step.take", Node("call", "max"), "Step.take has 2 of: call max"),
        ("Step.take", Node("call", "max", number=3), "Step.take has 2 of: call max number 3"),
        ("Step.take", Node("call", "add_", argument=2), "call add_ has 1 arguments"),
    ],
)
def test_what_is_missing_or_ambiguous_is_an_error(function, node, said):
    with pytest.raises(LookupError, match=said):
        replaced(SOURCE, function, node, "_")
