"""Imports point one way, without circles, and no module imports a private name of another."""

import ast
import re
from functools import cache
from pathlib import Path

import torch_thor

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")
}
PACKAGES = {
    name.removesuffix(".__init__"): MODULES.pop(name)
    for name in [*MODULES]
    if name.endswith(".__init__")
}

# Each package may import itself and those before it. Files are written with errors that a user
# reads.
LAYERS = (
    "torch_internals", "errors", "printing", "files",
    "intervals", "schedules", "curvature", "capture", "distributed", "optim", "split", "trainers",
    "training", "tools", "commands", "cli",
)  # fmt: skip
OPTIMIZERS = ("curvature", "capture", "distributed", "optim", "split")
# The package that each public name is from.
HOMES = {
    name: home.split(".")[1]
    for name, value in vars(torch_thor).items()
    if name in torch_thor.__all__ and (home := getattr(value, "__module__", None))
}


@cache
def imports_of(module):
    """(module, name, whether only for type checkers) of what a module imports of the package."""
    found, tree = [], ast.parse((MODULES | PACKAGES)[module].read_text())
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    blocks = [branch for branch in branches if ast.unparse(branch.test) == "TYPE_CHECKING"]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, which this test cannot read"
            if node.module.split(".")[0] == "torch_thor":
                found += [(node.module, alias.name, id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch_thor.")]
            found += [(name, None, id(node) in for_types) for name in names]
    return found


def test_imports_point_one_way():
    checked = 0
    for module in MODULES | PACKAGES:
        package = module.split(".")[1:2]
        for target, name, _ in imports_of(module) if package and package != ["__main__"] else ():
            home = target.split(".")[1] if "." in target else HOMES.get(name, name)
            if home != "__version__":
                checked += 1
                own = target.removeprefix("torch_thor.")  # a module with a layer of its own
                home = own if own in LAYERS else home
                assert LAYERS.index(home) <= LAYERS.index(package[0]), (
                    f"{module} imports {target}.{name}"
                )
    assert checked > 500


def reachable(modules, *, with_types):
    """What each of some modules imports of them, and what those import, and so on."""
    reached = {}
    for module in modules:
        named = [found for found in imports_of(module) if with_types or not found[2]]
        pairs = [(f"{target}.{name}", target) for target, name, _ in named]
        reached[module] = {part for pair in pairs for part in pair if part in modules} - {module}
    for _ in modules:
        reached = {
            module: own.union(*(reached[other] for other in own)) for module, own in reached.items()
        }
    return reached


def test_there_are_no_circles():
    optimizers = {module for module in MODULES if module.split(".")[1] in OPTIMIZERS}
    for modules, with_types in ((MODULES, False), (optimizers, True)):
        reached = reachable(modules, with_types=with_types)
        assert [module for module in modules if module in reached[module]] == []


def test_no_module_imports_a_private_name_of_another():
    for module in MODULES | PACKAGES:
        names = [f"{target}.{name}" for target, name, _ in imports_of(module) if name]
        assert not [name for name in names if re.search(r"\._(?!_version__)", name)], module
