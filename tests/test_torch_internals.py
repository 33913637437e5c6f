"""What torch does not document does what is needed of it, and is used through one module only."""

import ast
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from torch_thor import torch_internals
from torch_thor.torch_internals import (
    backward_id,
    backward_reaches,
    compile_stance,
    function_mode,
    functorch,
    is_tracing,
    storage_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
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


def test_backward_passes_are_told_apart():
    def nested(x):
        return [backward_id(), *in_backward(lambda _: backward_id()), backward_id()]

    assert backward_id() == -1
    [[outer, inner, again]] = in_backward(nested)
    assert outer == again >= 0
    assert inner not in (outer, -1)


def test_whether_a_weight_is_reached():
    """A leaf of autograd.grad is an error."""
    other, x = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
    reached = in_backward(
        lambda x: [backward_reaches(get_gradient_edge(one).node) for one in (x, other)]
    )
    assert reached == [[True, False]]
    y = x * 2
    y.register_hook(lambda _: backward_reaches(get_gradient_edge(x).node))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated")
def test_transforms_and_traces():
    found = []

    def forward(x):
        found.append((functorch() is not None, is_tracing()))
        return x * 2

    forward(torch.ones(2))
    torch.func.vmap(forward)(torch.ones(2))
    torch.jit.trace(forward, torch.ones(2), check_trace=False)
    assert found == [(False, False), (True, False), (False, True)]


def test_the_stance_of_the_compiler():
    # whatever the optimizers of other tests still wait for
    with torch.compiler.set_stance("default"):
        before = compile_stance(torch)
        with torch.compiler.set_stance("eager_on_recompile"):
            inside = compile_stance(torch)
            assert inside.stance == "eager_on_recompile"
            inside.stance = "force_eager"  # which is read whenever compiled code is called
            run = torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")
            assert not run()
        assert compile_stance(torch) is before
        assert run()


def test_the_innermost_mode_and_trees():
    outer, inner = TorchFunctionMode(), TorchFunctionMode()
    with outer:
        with inner:
            assert function_mode() is inner
        assert function_mode() is outer
    tree = {"a": [torch.ones(1), 2], "b": (3,)}
    leaves, shape = tree_flatten(tree)
    assert leaves == tree_leaves(tree) == [torch.ones(1), 2, 3]
    doubled = {"a": [2, 4], "b": (6,)}
    assert tree_unflatten([x * 2 for x in leaves], shape) == doubled
    assert tree_map(lambda x: x * 2, tree) == doubled


def private_names(path):
    """Dotted names of torch's that have a private part, as `torch._C._is_tracing`."""
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


def test_views_share_a_storage():
    for device in ("cpu", "meta"):
        one = torch.ones(2, device=device)
        assert storage_of(one[:1]) == storage_of(one)
        assert storage_of(one.clone()) != storage_of(one)


def test_private_names_are_in_one_module():
    found = {str(path.relative_to(SOURCE)): [*private_names(path)] for path in SOURCE.rglob("*.py")}
    assert found.pop("torch_internals.py")
    assert not {path: names for path, names in found.items() if names}
