"""What tests import: public names, and the insides of nothing but the module that they test.

Public is what a package lists in its `__all__`. A test of a module, which its own name names, may look inside of that
module, and of those beside it that no other module uses: `training/engine/test_loop.py` tests
`torch_thor.training.engine.loop`, `curvature/test_kinds_linear.py` something of `torch_thor.curvature.kinds`.
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

# What else a file may look into, and why nothing public would do.
EXCEPTIONS = {
    "hooked.py": ("capture.inspection capture.module_hooks", "hooks without an optimizer, for the tests of capture"),
    "tiny.py": ("capture.module_calls", "who listens to a model is nobody's business but that of tests"),
    "made_up_times.py": ("split.choice", "puts made-up times in the place of measured ones"),
    "capture/test_phases.py": (
        "capture.capture capture.forward_pass capture.module_calls curvature.layer_state",
        "leads one capture through its phases, as an optimizer does",
    ),
    "capture/test_module_hooks.py": ("capture.module_calls", "has the hooks told of calls"),
    "capture/test_composites.py": ("curvature.kinds.registry", "forgets the kinds that a test has registered"),
    "optim/thor/test_as_a_whole.py": ("curvature.refresh", "memory that runs out in the middle of a refresh"),
    "distributed/test_disagreement.py": ("curvature.refresh", "ranks whose hardware computes other numbers"),
    "split/test_choice.py": ("curvature.statistics", "counts the statistics that are alive"),
    "optim/thor/test_auto_split.py": (
        "curvature.statistics curvature.parameter_view split.choice",
        "a limit of 8192 rows that is small enough to be reached, and the sums that are gathered",
    ),
    "warm.py": ("cli training.experiment", "imports beforehand what the command line will import"),
    "rank_script.py": ("training.engine.parallel", "what each rank of training/engine/test_parallel.py runs"),
    "training/config/test_bert_recipes.py": (
        "training.models.masked_lm",
        "networks so small that the recipes of large ones train in a second",
    ),
    "training/text/dumps.py": ("training.text.sources", "units so small that a small dump has several"),
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
    """(module, name) for all that is imported by some code, and by scripts and targets of patches that are text in it.

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


def inside(module, name):
    """The module that an import looks into; `None` for what is public, and for other libraries."""
    if module.split(".")[0] != "torch_thor" or f"{module}:{name}" == COMMAND_LINE:
        return None
    if module in PACKAGES and (name is None or name in public_names(module)):
        return None
    if not exists(f"{module}.{name}"):
        return module
    return None if f"{module}.{name}" in PACKAGES else f"{module}.{name}"


def looked_into(path):
    """The modules that a file looks into."""
    return {inside(*one) for one in imported(path.read_text())} - {None}


@cache
def users():
    """For each module those that look into it."""
    found = defaultdict(set)
    for user, path in MODULES.items():
        for module in looked_into(path):
            found[module].add(user)
    return found


def own(test):
    """The module that a test tests, with those of the same package that nothing else uses; empty if there is none."""
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


def test_tests_look_into_what_they_test_alone():
    wrong = []
    for file in FILES:
        allowed = {f"torch_thor.{module}" for module in EXCEPTIONS.get(file, ("",))[0].split()}
        found = looked_into(TESTS / file) - own(file)
        wrong += [f"{file} looks into {module}" for module in sorted(found - allowed)]
        wrong += [f"{file} no longer looks into {module}: shorten EXCEPTIONS" for module in sorted(allowed - found)]
    assert not wrong, "import public names, or name a test after the module that it tests:\n" + "\n".join(wrong)
    assert set(EXCEPTIONS) <= set(FILES)


def test_what_counts_as_looking_into_a_module():
    loop = "torch_thor.training.engine.loop"
    code = f"""
from torch_thor.training import Run
import torch_thor, numpy
def test(patch):
    from {loop} import Run
    patch("{loop}.evaluate", None)
    run("import sys\\nfrom torch_thor.files import write_text")
"""
    assert {inside(*one) for one in imported(code)} == {None, loop, "torch_thor.files"}
    assert inside("torch_thor.training.engine", "loop") == inside(loop, None) == loop
    assert inside("torch_thor.training", "capture_state") == "torch_thor.training"  # no public name
    assert own("training/engine/test_loop.py") >= {loop, "torch_thor.training.engine.step"}  # nothing else steps
    assert "torch_thor.training.engine.history" not in own("training/engine/test_loop.py")
    assert own("curvature/test_kinds_linear.py") > {"torch_thor.curvature.kinds.linear"}
    assert own("training/engine/loop.py") == own("test_nothing.py") == set()
