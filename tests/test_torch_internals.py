"""Undocumented parts of torch do what the package needs, and are used through one module only."""

import ast
from pathlib import Path

import torch
from torch.autograd.graph import get_gradient_edge

from torch_thor import torch_internals
from torch_thor.torch_internals import (
    backward_id,
    backward_reaches,
)

SOURCE = Path(torch_internals.__file__).parent


def in_backward(ask):
    """What is answered in the middle of a backward pass by x."""
    answers, x = [], torch.ones(2, requires_grad=True)
    with torch.enable_grad():  # also inside another backward pass
        y = x * 2
        y.register_hook(lambda _: answers.append(ask(x)))
        y.sum().backward()
    return answers


def test_backward_passes_are_told_apart_and_whether_they_reach_a_weight():
    def nested(x):
        return [backward_id(), *in_backward(lambda _: backward_id()), backward_id()]

    assert backward_id() == -1
    [[outer, inner, again]] = in_backward(nested)
    assert outer == again >= 0
    assert inner not in (outer, -1)
    other = torch.ones(1, requires_grad=True)
    reached = in_backward(
        lambda x: [backward_reaches(get_gradient_edge(weight).node) for weight in (x, other)]
    )
    assert reached == [[True, False]]


def private_names(path):
    """Dotted names in torch that have a private part, such as `torch._C._is_tracing`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            names = [name] if name.split(".")[0] in ("torch", "dist") else []
        else:
            continue
        for name in names:
            parts = [part for part in name.split(".") if part.startswith("_")]
            if parts and not parts[0].startswith(("_foreach", "__")):
                yield name


def test_private_names_are_in_one_module():
    found = {str(path.relative_to(SOURCE)): [*private_names(path)] for path in SOURCE.rglob("*.py")}
    assert found.pop("torch_internals.py")
    assert not {path: names for path, names in found.items() if names}
