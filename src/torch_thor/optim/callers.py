"""Trainers that make an optimizer themselves: the line each needs, and the rate it asks for."""

import sys
import warnings
from collections.abc import Iterator
from types import FrameType

from torch import Tensor

# How an optimizer comes into a trainer, by the package that calls it with parameters alone.
_WITHIN = "`with torch_thor.model_is(model):` around"
_HUGGING_FACE = (
    f"make it yourself: Trainer(..., optimizers=({{0}}(model), None)), or {_WITHIN} "
    "trainer.train(); with model_init, return {0}(self.model) from Trainer.create_optimizer"
)
_TRAINERS = {
    "trl": _HUGGING_FACE,
    "transformers": _HUGGING_FACE,
    "lightning": "return {0}(self) from configure_optimizers",
    "pytorch_lightning": "return {0}(self) from configure_optimizers",
    "fastai": "Learner(..., opt_func=partial(OptimWrapper, opt=partial({0}, model=model)))",
    "stable_baselines3": (
        "make the agent with a learning_rate for {0}, then agent.policy.optimizer = "
        "{0}(agent.policy)"
    ),
    "timm": f"{_WITHIN} create_optimizer_v2(model, ...)",
    "torchtitan": f"{_WITHIN} the code that makes the OptimizersContainer",
}
USUAL = 5e-5  # learning_rate of TrainingArguments where none is given, in all of transformers


def line_of_caller() -> str:
    """Return the line for the trainer that makes the optimizer; empty if none is known."""
    for frame in _callers():
        if (package := _package(frame)) in _TRAINERS:
            return f"in {package}: {_TRAINERS[package]}"
    return ""


# Wrappers that make an optimizer of the parameters of one process, and their packages.
_DIVIDING, _DIVIDERS = {"ZeroRedundancyOptimizer", "OSS"}, {"torch", "fairscale"}


def refuse_divided_parameters(optimizer: str) -> None:
    """Raise an error if the caller gives each process an optimizer of some parameters alone."""
    # all processes raise it, when they make their optimizers, so that none waits for another
    for frame in _callers():
        # f_locals keeps what a frame holds alive, so those of the user are not read
        if _package(frame) not in _DIVIDERS:
            continue
        caller = frame.f_locals.get("self")
        dividing = _DIVIDING.intersection(base.__name__ for base in type(caller).__mro__)
        if dividing and getattr(caller, "world_size", 1) > 1:
            raise ValueError(
                f"{dividing.pop()} gives each process the parameters of its own part, so "
                f"{optimizer} would have other layers on each, while the statistics of each layer "
                f"come from all. Make {optimizer}(model, distributed=torch_thor.Distributed("
                "divide_curvature=True)), which divides the curvature among the processes, or "
                "give FSDP2's fully_shard the model first, which divides momentum and weights too"
            )


def lr_of_caller(lr: float | Tensor | None, optimizer: str) -> float | Tensor | None:
    """Return the learning rate of an optimizer that a Trainer of transformers may make.

    ``learning_rate`` of its arguments counts where no other is given. The default of transformers
    cannot be told from a choice, and is Adam's, so it means none.
    """
    for frame in _callers():
        if _package(frame) == "transformers":
            arguments = getattr(frame.f_locals.get("self"), "args", None)
            asked = getattr(arguments, "learning_rate", None)
            if asked is not None and (lr is None or lr == asked):
                if asked == USUAL:
                    warnings.warn(about_usual(optimizer), UserWarning, stacklevel=level_of_user())
                    return None
                return float(asked)
    return lr


def about_usual(optimizer: str) -> str:
    """Say what the default of transformers means."""
    return (
        f"learning_rate={USUAL} is the default of TrainingArguments, so {optimizer} finds its "
        f"learning rates from the weights; for a rate that counts as it is, give "
        "TrainingArguments(learning_rate=...) another one"
    )


def level_of_user() -> int:
    """Return the stack level of the first caller outside of this package and torch.

    It is for ``warnings.warn`` in the function that calls this.
    """
    for level, frame in enumerate(_callers(), 1):
        if _package(frame) not in ("torch", "torch_thor"):
            return level
    return 1


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        yield frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
