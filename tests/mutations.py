"""Put faults into a copy of the mathematics and the persistence, and see that tests catch each.

    python tests/mutations.py            # all, about five minutes
    python tests/mutations.py NAME ...   # some

An entry names a text that its file has once. The exit status is 1 if a mutation survives, or if an
entry has to be mended because its text is not there any more.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
    """A fault: a file of the package, the tests that must fail, a text and what it becomes."""

    file: str
    tests: tuple[str, ...]
    text: str
    becomes: str

    def apply(self, package: Path) -> None:
        """Put the fault into a package; LookupError: the text is not there, or several times."""
        path = package / self.file
        source = path.read_text(encoding="utf-8")
        if source.count(self.text) != 1:
            raise LookupError(f"there are {source.count(self.text)} of {self.text}")
        path.write_text(source.replace(self.text, self.becomes), encoding="utf-8")


MUTATIONS = {
    "second moment without the last block": Mutation(
        "curvature/blocks.py", STEPS,
        "in zip(self.block_sizes.runs, self.parts, strict=True):",
        "in [(self.block_sizes.runs[0], self.parts[0])]:",
    ),
    "left product transposed": Mutation(
        "curvature/blocks.py", STEPS,
        "product(part, flat[", "product(part.mT * 0.999, flat[",
    ),
    "right product without the scale": Mutation(
        "curvature/blocks.py", STEPS,
        "self.parts[0], 0.0, scale)", "self.parts[0], 0.0, 1.0)",
    ),
    "trace without tails": Mutation(
        "curvature/blocks.py", ("tests/curvature", *REFRESH),
        "if full < size:", "if False:",
    ),
    "blocks cut one row too late": Mutation(
        "curvature/blocks.py", ("tests/curvature",),
        "in range(start, stop, most)]", "in range(start + 1, stop, most)]",
    ),
    "damping without the root": Mutation(
        "curvature/refresh.py", STEPS,
        "math.sqrt(self.damping / self.rows_per_term)", "(self.damping / self.rows_per_term)",
    ),
    "damping without T": Mutation(
        "curvature/refresh.py", STEPS,
        "self.damping / self.rows_per_term", "self.damping",
    ),
    "relative damping of the trace": Mutation(
        "curvature/inverse.py", MUON,
        "trace / size", "trace",
    ),
    "trace rule the wrong way": Mutation(
        "curvature/refresh.py", (*RULE, *REFRESH),
        "change > thresholds[0]", "change >= thresholds[0] * 2",
    ),
    "ThorMuon with a trace rule": Mutation(
        "optim/preconditioner.py", MUON,
        'options.get("trace_thresholds")', 'options.get("trace_thresholds") or (0.01, 0.0)',
    ),
    "a layer never stops": Mutation(
        "curvature/refresh.py", (*RULE, *REFRESH),
        "Decision.STOP if change < thresholds[1] else Decision.KEEP", "Decision.KEEP",
    ),
    "running average the wrong way": Mutation(
        "curvature/inverse.py", (*STEPS, *REFRESH),
        "lerp_(old, run.new.decay)", "lerp_(old, 1 - run.new.decay)",
    ),
    "a failed block keeps its broken inverse": Mutation(
        "curvature/refresh.py", (*RULE, "tests/optim/test_failures.py"),
        "level == NOT_POSITIVE", "False",
    ),
    "gradients of outputs not scaled by N": Mutation(
        "curvature/layer.py", STEPS,
        "g_sum.rows.mul_(scale).mul_(scale)", "g_sum.rows.mul_(1.0).mul_(scale)",
    ),
    "rows that stand for all, without the weight of their call": Mutation(
        "curvature/kinds/matrix.py", COUNTED,
        "len(rows) / max(1, len(few))", "1.0",
    ),
    "rows that stand for all, from one position of all sequences": Mutation(
        "curvature/kinds/matrix.py", COUNTED,
        'generator=generator, device="cpu")', 'generator=generator, device="cpu") * 0',
    ),
    "rows of a step that a scaler skipped": Mutation(
        "capture/gathering.py", SKIPPED,
        "if self.scaler_stepped:", "if False:",
    ),
    "means over one row too many": Mutation(
        "curvature/layer.py", STEPS,
        "factor.rows.div_(rows)", "factor.rows.div_(rows + 1)",
    ),
    "1 / T of a weight forgotten": Mutation(
        "optim/natural.py", STEPS,
        "geometry, left, right, scale)", "geometry, left, right, 1.0)",
    ),
    "1 / T of a bias forgotten": Mutation(
        "optim/natural.py", STEPS,
        "geometry, g, None, scale, scales)", "geometry, g, None, 1.0, scales)",
    ),
    "a bias with A": Mutation(
        "optim/natural.py", STEPS,
        "geometry, g, None, scale, scales)", "geometry, a, None, scale, scales)",
    ),
    "weight decay forgotten": Mutation(
        "optim/update.py", STEPS,
        "batch.weights, alpha=decay)", "batch.weights, alpha=0.0)",
    ),
    "the bound too loose": Mutation(
        "optim/update.py", NATURAL,
        "1.0 if length <= longest_step else longest_step / length", "1.0",
    ),
    "kl_clip without lr": Mutation(
        "optim/update.py", STEPS,
        'float(batch.group["lr"]) ** 2', "1.0",
    ),
    "Nesterov forgotten": Mutation(
        "optim/batches.py", STEPS,
        "list(torch._foreach_add(directions, velocities, alpha=momentum))", "velocities",
    ),
    "Nesterov's second term without the momentum": Mutation(
        "optim/batches.py", STEPS,
        "directions, velocities, alpha=momentum)", "directions, velocities, alpha=1.0)",
    ),
    "momentum forgotten where a parameter takes its step by itself": Mutation(
        "optim/update.py", STEPS,
        "alpha=momentum, out=v)", "alpha=0.0, out=v)",
    ),
    "ThorMuon without depth": Mutation(
        "optim/thor_muon.py", MUON,
        "math.sqrt(min(1.0, _USUAL_DEPTH / max(1, binding.depth)))", "1.0",
    ),
    "ThorMuon's depth without matrices that have no factors": Mutation(
        "optim/batches.py", MUON,
        "len(moving & plan.matrix_of.keys())", "0",
    ),
    "ThorMuon's norm of a tall matrix": Mutation(
        "optim/orthogonal.py", MUON,
        "max(1.0, full.outputs / max(1, full.inputs))", "1.0",
    ),
    "weights that are trained, without rows of their own": Mutation(
        "optim/trained.py", TRAINED,
        " + squares.square().sum()", "",
    ),
    "a trained network from one matrix": Mutation(
        "optim/trained.py", TRAINED,
        "sum(value > DEPENDENT for value in told) > LEAST_SHARE * len(told)",
        "any(value > DEPENDENT for value in told)",
    ),
    "factors of a trained network decided again": Mutation(
        "optim/trained.py", TRAINED,
        "trained, values = is_trained(binding)", "trained, values = None",
    ),
    "equal rows counted": Mutation(
        "optim/trained.py", TRAINED,
        "matrix * ~equal.tril(-1).any(1, keepdim=True)", "matrix",
    ),
    "frozen numbers not compared with those that are trained": Mutation(
        "optim/trained.py", TRAINED,
        "others > sum(p.numel() for p in matrices)", "False",
    ),
    "ThorMuon's rate without the factor": Mutation(
        "optim/batches.py", TRAINED,
        'state.get("lr_factor", 1.0)', "1.0",
    ),
    "polar factors of one matrix": Mutation(
        "curvature/polar.py", ("tests/curvature/test_polar.py",),
        "values.maximum(noise).rsqrt()", "values.maximum(noise).sqrt()",
    ),
    "loading keeps the dtype of the base class": Mutation(
        "optim/state_dict.py", STATE,
        "parameter, value.dtype)", "parameter, parameter.dtype)",
    ),
    "a refresh is not counted": Mutation(
        "curvature/refresh.py", (*STATE, *REFRESH),
        "refreshes=layer.refreshes + 1", "refreshes=1",
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
