"""Which way imports point, in the package and in its tests.

In the package arrows point one way, without circles, and no module imports a private name of
another. Tests import what packages list in `__all__`, modules of the application, and private
names only of the package that they lie beside: `tests/capture` of `torch_thor.capture`,
`tests/test_files.py` of `torch_thor.files`.
"""

import ast
import re
from functools import cache
from pathlib import Path

from torch import nn

import torch_thor

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
FILES = sorted(
    str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if path != Path(__file__)
)
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
# The package that each public name is from.
HOMES = {
    name: home.split(".")[1]
    for name, value in vars(torch_thor).items()
    if name in torch_thor.__all__ and (home := getattr(value, "__module__", None))
}

# Files that need private names of other packages: these modules, and why.
EXCEPTIONS = {
    "pretend.py": "curvature.blocks",  # the pretend device has pinned memory
    "command_line.py": "cli",
    "third_optimizer.py": "optim.base optim.natural",  # is an optimizer
    "tiny.py": "capture.hooks",  # tells which modules have hooks
    "test_split.py": "curvature.layer",  # counts the statistics that exist at the same time
    "capture/test_composites.py": "curvature.kinds.registry",  # removes kinds that are registered
    "distributed/test_traffic.py": "tools.traffic",  # what a plan counts is what is sent
    "optim/test_as_a_whole.py": "curvature.refresh",  # exhausts the memory in a refresh
    "optim/test_device.py": "curvature.inverse curvature.polar",  # accelerators and CPUs
    "test_readable_reference.py": "reference",
    "tools/test_split_dim.py": "split",  # replaces a measurement of time
}


# ---- the package ---------------------------------------------------------------------------------


@cache
def imports_of(module):
    """[(module, name, whether for type checkers alone)] of what a module imports of the package."""
    found, tree = [], ast.parse((MODULES | PACKAGES)[module].read_text())
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    blocks = [one for one in branches if ast.unparse(one.test) == "TYPE_CHECKING"]
    of_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import, which is not looked at here"
            if node.module.split(".")[0] == "torch_thor":
                found += [(node.module, alias.name, id(node) in of_types) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch_thor.")]
            found += [(name, None, id(node) in of_types) for name in names]
    return found


def test_arrows_point_one_way():
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


OPTIMIZERS = ("curvature", "capture", "distributed", "optim", "split")


def reachable(modules, *, with_types):
    """What each of some modules imports of them, and what those import, and so on."""
    reached = {}
    for module in modules:
        named = [one for one in imports_of(module) if with_types or not one[2]]
        pairs = [(f"{target}.{name}", target) for target, name, _ in named]
        reached[module] = {one for pair in pairs for one in pair if one in modules} - {module}
    for _ in modules:
        reached = {one: of.union(*(reached[each] for each in of)) for one, of in reached.items()}
    return reached


def test_no_circles():
    of_optimizers = {module for module in MODULES if module.split(".")[1] in OPTIMIZERS}
    for modules, with_types in ((MODULES, False), (of_optimizers, True)):
        reached = reachable(modules, with_types=with_types)
        assert [module for module in modules if module in reached[module]] == []


def private_attributes(module):
    """The private attributes that a module gives its own objects, and those that it uses of any."""
    own, used = set(), set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ClassDef):
            named = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
            named += [t for n in node.body if isinstance(n, ast.Assign) for t in n.targets]
            own |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            own |= {ast.unparse(target) for target in named}
        elif isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            is_own = ast.unparse(node.value) in ("self", "cls", "super()")
            (own if is_own else used).add(node.attr)
    return own, used


def test_no_module_uses_a_private_attribute_of_another():
    found = {m: private_attributes(m) for m in MODULES if m.split(".")[1] in OPTIMIZERS}
    ours = {name for own, _ in found.values() for name in own} - vars(nn.Module()).keys()
    assert len(ours) > 100
    assert not [(m, name) for m, (own, used) in found.items() for name in used & ours - own]


def test_the_package_imports_nothing_of_the_repository():
    """Benchmarks and tests are in no wheel."""
    found = {}
    for module, path in (MODULES | PACKAGES).items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or alias.name for alias in node.names]
                found |= {name.split(".")[0]: module for name in names}
    assert {"torch", "torch_thor"} <= found.keys()
    ours = {"benchmarks", "tests", *(path.stem for path in TESTS.iterdir())}
    assert {name: found[name] for name in found.keys() & ours} == {}


def test_no_module_imports_a_private_name_of_another():
    found = [
        (module, f"{target}.{name}")
        for module in MODULES | PACKAGES
        for target, name, _ in imports_of(module)
        if name and re.search(r"\._(?!_version__)", f"{target}.{name}")
    ]
    assert not found


# ---- the tests -----------------------------------------------------------------------------------


@cache
def public_names(package):
    for node in ast.parse(PACKAGES[package].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {"__version__", *ast.literal_eval(node.value)}
    return set()


def imported(code):
    """(module, name) for each import; the name is `None` where a module is imported by its name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


def private_module(module, name):
    """The module of which an import takes a private name, or None."""
    if module.split(".")[0] != "torch_thor":
        return None
    if module.split(".")[1:2] in (["training"], ["errors"], ["printing"]):
        return None  # the application has no other names than those of its modules
    if module in PACKAGES and (name is None or name in public_names(module)):
        return None
    whole = f"{module}.{name}"
    if whole in PACKAGES:
        return None
    return whole if whole in MODULES else module


def test_tests_import_public_names():
    wrong = []
    for file in FILES:
        beside = file.split("/")[0].removesuffix(".py").removeprefix("test_")
        found = {private_module(*one) for one in imported((TESTS / file).read_text())} - {None}
        found = {module for module in found if module.split(".")[1:2] != [beside]}
        allowed = {f"torch_thor.{module}" for module in EXCEPTIONS.get(file, "").split()}
        wrong += [f"{file} imports private names of {module}" for module in sorted(found - allowed)]
        wrong += [
            f"{file} no longer needs {module}: remove it from EXCEPTIONS"
            for module in sorted(allowed - found)
        ]
    assert not wrong, "\n".join(wrong)
    assert set(EXCEPTIONS) <= set(FILES)
