"""Put faults into a copy of the mathematics and the persistence, and see that tests catch each.

    python tests/mutations.py            # all, about five minutes
    python tests/mutations.py NAME ...   # some

An entry names an expression of a function by what it is about (`nodes.py`), so it survives other
formatting and other code around it. The exit status is 1 if a mutation survives, or if an entry has
to be mended because its expression is not there any more.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nodes import Node, replaced

ROOT = Path(__file__).parents[1]
STEPS = ("tests/optim/test_layer_kinds.py", "tests/optim/test_step.py")
MUON = ("tests/optim/test_thor_muon.py", "tests/test_readable_reference.py")
TRAINED = ("tests/optim/test_trained.py",)
STATE = ("tests/optim/test_state.py", "tests/optim/test_loading.py")
COUNTED = ("tests/optim/test_what_counts.py",)
SKIPPED = ("tests/optim/test_amp.py",)
REFRESH = ("tests/optim/test_refresh.py",)
RULE = ("tests/curvature/test_refresh_rule.py",)
NATURAL = ("tests/optim/test_natural.py",)


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Args:
        file: the file, below src/torch_thor.
        function: the qualified name of the function.
        node: the expression in it.
        becomes: the expression in its place, in which ``_`` is what it was.
        tests: the tests that must fail.
    """

    file: str
    function: str
    node: Node
    becomes: str
    tests: tuple[str, ...]

    def apply(self, package: Path) -> None:
        """Put the fault into the package at a path; LookupError says why that cannot be."""
        path = package / self.file
        if not path.is_file():
            raise LookupError("there is no such file")
        source = path.read_text(encoding="utf-8")
        faulty = replaced(source, self.function, self.node, self.becomes)
        path.write_text(faulty, encoding="utf-8")


MUTATIONS = {
    "second moment without the last block": Mutation(
        "curvature/blocks.py", "Blocks.add_second_moment_",
        Node("loop"), "list(_)[:1]", STEPS,
    ),
    "left product transposed": Mutation(
        "curvature/blocks.py", "Blocks.left_multiply",
        Node("call", "product", number=2, argument=1), "_.mT * 0.999", STEPS,
    ),
    "right product without the scale": Mutation(
        "curvature/blocks.py", "Blocks.write_right_product_",
        Node("call", "add_product_", number=1, argument=5), "1.0", STEPS,
    ),
    "trace without tails": Mutation(
        "curvature/blocks.py", "Blocks.traces",
        Node("operator", "<"), "False", ("tests/curvature", *REFRESH),
    ),
    "blocks cut one row too late": Mutation(
        "curvature/blocks.py", "BlockSizes.of",
        Node("call", "range", number=2, argument=1), "_ + 1", ("tests/curvature",),
    ),
    "damping without the root": Mutation(
        "curvature/refresh.py", "Candidate.judge",
        Node("call", "sqrt"), "self.damping / self.rows_per_term", STEPS,
    ),
    "damping without T": Mutation(
        "curvature/refresh.py", "Candidate.judge",
        Node("call", "sqrt", argument=1), "self.damping", STEPS,
    ),
    "relative damping of the trace": Mutation(
        "curvature/inverse.py", "relative_damping",
        Node("operator", "/", number=1), "trace", MUON,
    ),
    "trace rule the wrong way": Mutation(
        "curvature/refresh.py", "decide",
        Node("operator", ">"), "change >= thresholds[0] * 2", (*RULE, *REFRESH),
    ),
    "ThorMuon with a trace rule": Mutation(
        "optim/preconditioner.py", "Preconditioner._candidate",
        Node("keyword", "thresholds"), "_ or (0.01, 0.0)", MUON,
    ),
    "a layer never stops": Mutation(
        "curvature/refresh.py", "decide",
        Node("return", number=2), "Decision.KEEP", (*RULE, *REFRESH),
    ),
    "running average the wrong way": Mutation(
        "curvature/inverse.py", "_average_",
        Node("call", "lerp_", argument=2), "1 - _", (*STEPS, *REFRESH),
    ),
    "a failed block keeps its broken inverse": Mutation(
        "curvature/refresh.py", "Candidate.commit",
        Node("operator", "=="), "False", (*RULE, "tests/optim/test_failures.py"),
    ),
    "gradients of outputs not scaled by N": Mutation(
        "curvature/layer.py", "Statistics.scale_gradients_",
        Node("call", "mul_", number=1, argument=1), "1.0", STEPS,
    ),
    "rows that stand for all, without the weight of their call": Mutation(
        "curvature/kinds/matrix.py", "LinearKind.add_inputs_",
        Node("call", "add_second_moment_", argument=2), "1.0", COUNTED,
    ),
    "rows that stand for all, from one position of all sequences": Mutation(
        "curvature/kinds/matrix.py", "standing_for_all",
        Node("call", "randint"), "_ * 0", COUNTED,
    ),
    "rows of a step that a scaler skipped": Mutation(
        "capture/gathering.py", "Capture._note_pass",
        Node("call", "discard"), "None", SKIPPED,
    ),
    "means over one row too many": Mutation(
        "curvature/layer.py", "Statistics.take",
        Node("call", "div_", argument=1), "_ + 1", STEPS,
    ),
    "1 / T of a weight forgotten": Mutation(
        "optim/natural.py", "_matrices_of",
        Node("call", "Matrix", number=2, argument=6), "1.0", STEPS,
    ),
    "1 / T of a bias forgotten": Mutation(
        "optim/natural.py", "_matrices_of",
        Node("call", "Matrix", number=3, argument=6), "1.0", STEPS,
    ),
    "a bias with A": Mutation(
        "optim/natural.py", "_matrices_of",
        Node("call", "Matrix", number=3, argument=4), "a", STEPS,
    ),
    "weight decay forgotten": Mutation(
        "optim/update.py", "with_decay",
        Node("keyword", "alpha"), "0.0", STEPS,
    ),
    "the bound too loose": Mutation(
        "optim/update.py", "_trust_ratio",
        Node("return", number=2), "1.0", NATURAL,
    ),
    "kl_clip without lr": Mutation(
        "optim/update.py", "within_kl_clip",
        Node("operator", "**"), "1.0", STEPS,
    ),
    "Nesterov forgotten": Mutation(
        "optim/batches.py", "momentum_",
        Node("return", number=2), "velocities", STEPS,
    ),
    "Nesterov's second term without the momentum": Mutation(
        "optim/batches.py", "momentum_",
        Node("keyword", "alpha"), "1.0", STEPS,
    ),
    "momentum forgotten where a parameter takes its step alone": Mutation(
        "optim/update.py", "with_momentum",
        Node("keyword", "alpha"), "0.0", STEPS,
    ),
    "ThorMuon without depth": Mutation(
        "optim/thor_muon.py", "ThorMuon._update",
        Node("call", "sqrt"), "1.0", MUON,
    ),
    "ThorMuon's depth without matrices that have no factors": Mutation(
        "optim/batches.py", "Binding.__init__",
        Node("call", "len", number=3), "0", MUON,
    ),
    "ThorMuon's norm of a tall matrix": Mutation(
        "optim/orthogonal.py", "Projection.__post_init__",
        Node("call", "max", number=3), "1.0", MUON,
    ),
    "weights that are trained, without rows of their own": Mutation(
        "optim/trained.py", "rectangles",
        Node("return"), "gram.square().sum() - of_lines", TRAINED,
    ),
    "a trained network from one matrix": Mutation(
        "optim/trained.py", "_look_trained",
        Node("return"), "dependent > 0", TRAINED,
    ),
    "factors of a trained network decided again": Mutation(
        "optim/trained.py", "decide",
        Node("call", "is_trained"), "None", TRAINED,
    ),
    "equal rows counted": Mutation(
        "optim/trained.py", "_without_equal_rows",
        Node("return"), "matrix", TRAINED,
    ),
    "frozen numbers not compared with those that are trained": Mutation(
        "optim/trained.py", "decide",
        Node("operator", ">"), "False", TRAINED,
    ),
    "ThorMuon's rate without the factor": Mutation(
        "optim/batches.py", "rows_of",
        Node("call", "get", 2), "1.0", TRAINED,
    ),
    "polar factors of one matrix": Mutation(
        "curvature/polar.py", "_roots",
        Node("call", "rsqrt"), "values.maximum(noise).sqrt()", ("tests/curvature/test_polar.py",),
    ),
    "loading keeps the dtype of the base class": Mutation(
        "optim/state_dict.py", "load",
        Node("call", "_as_made", argument=4), "parameter.dtype", STATE,
    ),
    "a refresh is not counted": Mutation(
        "curvature/refresh.py", "Candidate.commit",
        Node("keyword", "refreshes"), "1", (*STATE, *REFRESH),
    ),
}  # fmt: skip


def tried(mutation: Mutation) -> tuple[bool, str]:
    """Return whether a mutation was caught, and by which test, or how the tests ended."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "tests", "pyproject.toml", "recipes"):
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder) / part)
        mutation.apply(Path(folder) / "src" / "torch_thor")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "-m", "not slow", *mutation.tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode == 1 and failed:
        test = failed[0].removeprefix("FAILED ").partition(" - ")[0]
        return True, f"caught by {test}"
    return False, f"SURVIVED: pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main(names: list[str]) -> int:
    """Try the mutations, print what became of each, and return the exit status."""
    failed = 0
    for name in names or MUTATIONS:
        mutation = MUTATIONS[name]
        try:
            caught, what = tried(mutation)
        except LookupError as error:
            caught, what = False, f"mend this entry: {mutation.file}: {error}"
        failed += not caught
        print(f"{name}: {what}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
