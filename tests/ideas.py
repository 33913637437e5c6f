"""How much there is to know: statements of each package, files and functions of a step, classes.

    python tests/ideas.py   # what test_budgets.py holds

Statements are counted by ``ast``, without docstrings; an assignment to a tuple counts its targets.
A step is a forward pass, a backward pass and ``step()`` on Linear-ReLU-Linear; comprehensions count
as part of their function.
"""

import ast
import gc
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import torch_thor
from torch_thor import THOR, ThorMuon

ROOT = Path(torch_thor.__file__).parent
CORE = ("optim", "curvature", "capture", "distributed", "split")  # the optimizers' half
INTERVAL = 5


def _docstring_of(parent):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    first = parent.body[0] if isinstance(parent, kinds) and parent.body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def _weight(node):
    """An assignment to a tuple counts its targets."""
    if not isinstance(node, ast.Assign):
        return 1
    return max(len(t.elts) if isinstance(t, ast.Tuple | ast.List) else 1 for t in node.targets)


def statements_of(tree):
    """The number of statements of a module, without docstrings."""
    return sum(
        _weight(node)
        for parent in ast.walk(tree)
        for node in ast.iter_child_nodes(parent)
        if isinstance(node, ast.stmt) and node is not _docstring_of(parent)
    )


def statements():
    """The statements of each package; of a module on the floor of the package, of its own."""
    found = Counter()
    for path in ROOT.rglob("*.py"):
        inside = path.relative_to(ROOT)
        found[inside.with_suffix("").parts[0]] += statements_of(ast.parse(path.read_text()))
    return found


def passes(train):
    """The files and the functions of the package that a call goes through."""
    functions = set()

    def note(frame, event, _):
        code = frame.f_code
        is_ours = code.co_filename.startswith(str(ROOT))
        if event == "call" and is_ours and not code.co_name.endswith(("comp>", "expr>")):
            functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
    return len({file for file, *_ in functions}), len(functions)


def steps(optimizer):
    """(files, functions) of an ordinary step and of a refresh, and the classes of a training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    trained = optimizer(model, update_interval=INTERVAL)

    def train():
        x, y = torch.randn(32, 8), torch.randint(4, (32,))
        trained.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        trained.step()

    for _ in range(INTERVAL):
        train()
    refresh = passes(train)
    assert trained.last_refresh
    train()
    return passes(train), refresh, reachable(trained)


def reachable(start):
    """The classes of the package whose instances an optimizer refers to."""
    seen, found, stack = set(), set(), [start]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, type | type(sys)):
            continue
        seen.add(id(thing))
        if type(thing).__module__.startswith("torch_thor"):
            found.add(type(thing))
        if len(seen) < 200_000:
            hidden = ("frame", "function", "builtin_function_or_method")
            stack += [o for o in gc.get_referents(thing) if type(o).__name__ not in hidden]
    return found


def main():
    """Print everything."""
    found = statements()
    found["core"], found["all"] = sum(found[name] for name in CORE), found.total()
    for name, count in sorted(found.items()):
        print(f"{name:16}{count:8,}")
    for optimizer in (THOR, ThorMuon):
        ordinary, refresh, classes = steps(optimizer)
        found = f"{ordinary} in an ordinary step, {refresh} in a refresh, {len(classes)} classes"
        print(f"{optimizer.__name__}: (files, functions) {found}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
