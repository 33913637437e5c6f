"""All problems, by name: those of the suite, of the fine-tuning, and nanoGPT's CPU example."""

from benchmarks import finetuning_problems, suite_problems
from benchmarks.nanogpt_problem import NANOGPT
from benchmarks.suite_problems import Batch, Problem

__all__ = ["PROBLEMS", "Batch", "Problem"]

PROBLEMS: dict[str, Problem] = {
    **suite_problems.PROBLEMS,
    **finetuning_problems.PROBLEMS,
    **finetuning_problems.UNSEEN,
    "nanogpt": NANOGPT,
}
