"""Tests import public names, and private names only of the module that they test.

Public names are those that a package lists in `__all__`. A test is named after the module that it tests, or begins with
its name: `training/engine/test_loop.py` tests `torch_thor.training.engine.loop`, `curvature/test_kinds_embedding.py`
tests `torch_thor.curvature.kinds`. It may also import private names of modules in the same package if only the tested
module uses them.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if path != Path(__file__))
MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
PACKAGES = {name.removesuffix(".__init__"): MODULES.pop(name) for name in [*MODULES] if name.endswith(".__init__")}

COMMAND_LINE = "torch_thor.cli:main"

# Files that need private names of other modules: these modules, and the reason.
EXCEPTIONS = {
    "hooked.py": ("capture.inspection capture.module_hooks", "makes hooks without an optimizer"),
    "tiny.py": ("capture.module_calls", "tells which modules have hooks, for which there is no public function"),
    "fake_times.py": ("split.choice", "replaces a measurement of time"),
    "capture/test_phases.py": (
        "capture.capture capture.module_calls curvature.layer_state",
        "changes the phases of a capture as an optimizer does",
    ),
    "capture/test_module_hooks.py": ("capture.module_calls", "calls the hooks as in a forward pass"),
    "capture/test_composites.py": ("curvature.kinds.registry", "removes the kinds that a test has registered"),
    "optim/test_as_a_whole.py": ("curvature.refresh", "simulates that memory is exhausted during a refresh"),
    "optim/test_natural_gradient_bound.py": (
        "optim.step_bound",
        "tests the bound as the natural gradient applies it",
    ),
    "distributed/test_disagreement.py": ("curvature.inverse", "simulates ranks that compute different numbers"),
    "distributed/test_divided_curvature.py": (
        "optim.divided_curvature",
        "lowers the number of elements of a turn",
    ),
    "distributed/test_traffic.py": (
        "distributed.divided training.reports.plan_divided training.reports.traffic",
        "compares what a plan counts with what is sent, in turns of few elements",
    ),
    "split/test_choice.py": ("curvature.statistics", "counts the statistics that exist at the same time"),
    "optim/test_auto_split.py": (
        "curvature.statistics curvature.parameter_view split.choice",
        "lowers the limit of 8192 rows, and reads the sums that are gathered",
    ),
    "warm.py": ("cli training.experiment", "imports in advance what the command line imports"),
    "signalled_script.py": ("training.engine.step", "sends itself a signal in a step of the test's choice"),
    "killed_script.py": (
        "training.checkpoints.checkpoint training.checkpoints.divided training.checkpoints.saving "
        "training.engine.loop training.engine.precision training.experiment",
        "kills itself at a moment of the test's choice",
    ),
    "rank_script.py": ("training.engine.parallel", "is the program of each rank in training/engine/test_parallel.py"),
    "training/config/test_bert_recipes.py": (
        "training.models.masked_lm",
        "makes networks so small that the recipes of large ones train in a second",
    ),
    "bench/figures/small_bert.py": (
        "bench.figures.bert",
        "replaces the recipe of the figure by one that takes seconds",
    ),
    "bench/figures/test_bert_figure.py": ("bench.figures.measuring", "writes runs as raw data hold them"),
    "bench/figures/test_run_times.py": ("bench.figures.measuring", "writes a run as raw data hold it"),
    "bench/test_prepare_memory.py": (
        "training.text.sources training.text.wikipedia training.text.word_counts",
        "reads a synthetic dump as the preparation reads a real one",
    ),
    "training/text/test_word_counts.py": ("training.text.wordpiece", "compares counted words with a tokenizer's"),
    "training/text/dumps.py": ("training.text.sources", "lowers the size of a work unit"),
    "training/text/test_preparing.py": ("training.text.sources", "lowers it in the processes of the command too"),
}


def exists(module):
    return module in MODULES or module in PACKAGES


@cache
def public_names(package):
    for node in ast.parse(PACKAGES[package].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {"__version__", *ast.literal_eval(node.value)}
    return set()


def imported(code):
    """(module, name) for each import in `code`, in scripts that it contains as text, and in names of patched objects.

    The name is `None` where a module is imported by its full name.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if lines := re.findall(r"^(?:from|import) torch_thor.*", node.value, re.MULTILINE):
                yield from imported("\n".join(lines))
            if re.fullmatch(r"torch_thor(\.\w+)+", node.value):
                module, *names = node.value.split(".")
                while names and exists(f"{module}.{names[0]}"):
                    module = f"{module}.{names.pop(0)}"
                yield module, names[0] if names else None


def private_module(module, name):
    """The module of which an import takes a private name; `None` for public names and other libraries."""
    if module.split(".")[0] != "torch_thor" or f"{module}:{name}" == COMMAND_LINE:
        return None
    if module in PACKAGES and (name is None or name in public_names(module)):
        return None
    if not exists(f"{module}.{name}"):
        return module
    return None if f"{module}.{name}" in PACKAGES else f"{module}.{name}"


def private_imports(path):
    """The modules of which a file imports private names."""
    return {private_module(*one) for one in imported(path.read_text())} - {None}


@cache
def users():
    """For each module the modules that import private names of it."""
    found = defaultdict(set)
    for user, path in MODULES.items():
        for module in private_imports(path):
            found[module].add(user)
    return found


def modules_under_test(test):
    """The module that a test is named after, and modules of its package that only this one uses; may be empty."""
    folder, name = test.rpartition("/")[::2]
    package = ".".join(["torch_thor", *folder.split("/")]).rstrip(".")
    words = name.removesuffix(".py").split("_")
    if words.pop(0) != "test":
        return set()
    longest_first = (f"{package}.{'_'.join(words[:count])}" for count in range(len(words), 0, -1))
    tested = next((module for module in longest_first if exists(module)), None)
    found = {module for module in MODULES if tested and f"{module}.".startswith(f"{tested}.")}
    beside = {module for module in users() if tested and module.rpartition(".")[0] == package}
    while more := {module for module in beside - found if users()[module] <= found}:
        found |= more
    return found


def test_tests_import_public_names():
    wrong = []
    for file in FILES:
        allowed = {f"torch_thor.{module}" for module in EXCEPTIONS.get(file, ("",))[0].split()}
        found = private_imports(TESTS / file) - modules_under_test(file)
        wrong += [f"{file} imports private names of {module}" for module in sorted(found - allowed)]
        wrong += [f"{file} no longer needs {module}: remove it from EXCEPTIONS" for module in sorted(allowed - found)]
    assert not wrong, "import public names, or name the test after the module that it tests:\n" + "\n".join(wrong)
    assert set(EXCEPTIONS) <= set(FILES)


def test_private_names_are_found():
    loop = "torch_thor.training.engine.loop"
    code = f"""
from torch_thor.training import Run
import torch_thor, numpy
def test(patch):
    from {loop} import Run
    patch("{loop}.evaluate", None)
    run("import sys\\nfrom torch_thor.files import write_text")
"""
    assert {private_module(*one) for one in imported(code)} == {None, loop, "torch_thor.files"}
    assert private_module("torch_thor.training.engine", "loop") == private_module(loop, None) == loop
    assert private_module("torch_thor.training", "capture_state") == "torch_thor.training"  # not in `__all__`
    of_loop = modules_under_test("training/engine/test_loop.py")
    assert of_loop >= {loop, "torch_thor.training.engine.step"}  # only the loop imports `step`
    assert "torch_thor.training.engine.history" not in of_loop
    assert modules_under_test("curvature/test_kinds_embedding.py") > {"torch_thor.curvature.kinds.embedding"}
    assert modules_under_test("training/engine/loop.py") == modules_under_test("test_nothing.py") == set()
