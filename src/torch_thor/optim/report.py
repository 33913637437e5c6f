"""What an optimizer reports: its model's coverage now, its description, and step warnings."""

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_thor.capture.coverage import Covered, table
from torch_thor.capture.patterns import some
from torch_thor.capture.reasons import LEFT_OUT, NOT_TRAINED
from torch_thor.curvature.factor import local
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.optim.callers import level_of_user
from torch_thor.optim.learned import LEARNED, NEW, REST
from torch_thor.optim.options import COUNTERS
from torch_thor.optim.plan import Binding, Plan, parameters

NO_OPTIONS = {"params", "param_names", *COUNTERS}  # entries of a parameter group
LR_JUDGED = (1, 10)  # the steps whose learning rates are compared
_UNCALLED = "the weight is used without calling the module, so no statistics come"


def current(binding: Binding) -> list[Covered]:
    """Return the entries of an inspection as they are now."""
    named, entries = dict(binding.plan.model.named_parameters()), []
    for entry in binding.plan.entries:
        parameter = named.get(entry.name)
        if parameter is None:
            continue
        layer_parameters = binding.layer_parameters(parameter) if entry.preconditioned else []
        if not parameter.requires_grad:
            can_be_trained = parameter.is_floating_point() or parameter.is_complex()
            reason = "frozen (requires_grad=False)" if can_be_trained else entry.reason
            entry = replace(entry, reason=reason, trained=False)
        elif layer_parameters and not any(
            part.layer.weight.requires_grad for part in layer_parameters
        ):
            entry = replace(entry, reason="the weight of its layer is frozen")
        elif layer_parameters and all(
            part.layer.uncalled and not part.layer.refreshes for part in layer_parameters
        ):
            entry = replace(
                entry,
                reason=_UNCALLED
                if layer_parameters[0].is_weight
                else f"like its layer: {_UNCALLED}",
            )
        entries.append(entry)
    return entries


def sizes(entries: Iterable[Covered]) -> tuple[int, int]:
    """Count the elements of the trained parameters: those that are preconditioned, and all."""
    trained = [(math.prod(entry.shape), entry.preconditioned) for entry in entries if entry.trained]
    return sum(size for size, covered in trained if covered), sum(size for size, _ in trained)


def warn_of_little(entries: Iterable[Covered], optimizer: str) -> None:
    """Warn if less than half of the trained parameters is preconditioned.

    Parameters that ``layers=`` leaves out are not counted.
    """
    entries = [entry for entry in entries if entry.reason != LEFT_OUT]
    covered, total = sizes(entries)
    if 2 * covered >= total:
        return
    plain = [entry for entry in entries if entry.trained and not entry.preconditioned]
    plain.sort(key=lambda entry: math.prod(entry.shape), reverse=True)
    largest = "; ".join(f"{e.name} {e.shape} ({e.rest}): {e.reason}" for e in plain[:3])
    more = f"; and {len(plain) - 3} more" if len(plain) > 3 else ""
    warnings.warn(
        f"{optimizer} preconditions {covered:,} of {total:,} trained parameters "
        f"({covered / total:.0%}). The largest of the others: {largest}{more}. print(optimizer) "
        "lists all",
        UserWarning,
        stacklevel=level_of_user(),
    )


def _bytes_of_state(optimizer: Any, trained: int) -> str:
    """Return how much memory the state takes on this process, which the first step makes."""
    entries = [entry for state in optimizer.state.values() for entry in state.values()]
    size = sum(local(entry).nbytes for entry in entries if isinstance(entry, Tensor))
    if not size:
        return "State: none before the first step"
    each = f", {size / trained:.1f} for each trained parameter" if trained else ""
    return f"State: {size:,} bytes{each}"


def described(optimizer: Any) -> str:
    """Return the options of each group, the size of the state, and what each parameter gets."""
    lines = [f"{type(optimizer).__name__} ("]
    for number, group in enumerate(optimizer.param_groups):
        keys = [
            key
            for key in dict.fromkeys((*optimizer.defaults, *group))
            if key in group and key not in NO_OPTIONS
        ]
        lines += [f"Parameter Group {number}", *(f"    {key}: {group[key]}" for key in keys)]
    entries = optimizer.coverage()
    part, total = sizes(entries)
    split = ", ".join(dict.fromkeys(str(group["split_dim"]) for group in optimizer.param_groups))
    count = sum(layer.weight.requires_grad for layer in optimizer.curvature.values())
    lines += [
        _bytes_of_state(optimizer, total),
        ")",
        f"{part:,} of {total:,} trained parameters, in {count} layers, are preconditioned:",
    ]
    return "\n".join((*lines, table(entries, f"factors (split {split})")))


def nothing_found(optimizer: type, binding: Binding) -> str:
    """Return the text of the error for a model without a layer to precondition."""
    label = optimizer.__name__
    return (
        f"{label} found no layer to precondition among what is trained in "
        f"{type(binding.plan.model).__name__}; use torch.optim.SGD, or give {label} the weights of "
        f"its layers. What it found:\n{table(current(binding))}"
    )


# ---- warnings of a step --------------------------------------------------------------------------


class StepWarnings:
    """Warnings that are issued when the step is complete, each once.

    They wait until then because a program may turn warnings into errors.
    """

    def __init__(self, optimizer: type) -> None:
        self.label = optimizer.__name__
        self._known: set[Hashable] = set()
        self.first_lr = math.inf
        # the names that one text is about, by its two parts
        self.pending: dict[tuple[str, str], list[str]] = {}

    def note(self, about: Hashable, message: str, name: str | None = None, then: str = "") -> None:
        """Add a warning, unless one about the same problem has been added before."""
        if about not in self._known:
            self._known.add(about)
            names = self.pending.setdefault((message, then), [])
            names += [] if name is None else [repr(name)]

    def issue(self) -> None:
        """Issue the warnings that have been added."""
        pending, self.pending = self.pending, {}
        for (message, then), names in pending.items():
            others = f" (likewise {some(names[1:])})" if len(names) > 1 else ""
            text = f"{message}{''.join(names[:1])}{others}{then}"
            warnings.warn(text, RuntimeWarning, stacklevel=level_of_user())

    def note_layer(self, layer: LayerCurvature, what: str) -> None:
        """Warn of a problem of a layer, once for each layer and problem."""
        step = layer.weight_view.options["step"]
        self.note((layer.name, what), f"{self.label}, step {step}, layer ", layer.name, f": {what}")

    def note_changes(self, before: Plan, now: Plan) -> None:
        """Warn of what a model change means: layers that are gone, parameters not trained."""
        label, known = self.label, {e.name for e in before.entries if e.reason == NOT_TRAINED}
        new = [e.name for e in now.entries if e.reason == NOT_TRAINED and e.name not in known]
        then = _untrained(new) if new else "What takes its place is trained plainly"
        if now.sharded and not before.sharded:
            self.note(
                "divided",
                f"{label}: the parameters were divided among processes after {label} was made, so "
                f"this step has no statistics that it can use; make {label} after fully_shard",
            )
        for why in now.unfit:
            self.note(why, f"{label}: {why}. It is orthogonalised as one matrix")
        weights = {id(layer.weight_view.parameter) for layer in now.layers.values()}
        for name in sorted(before.layers.keys() - now.layers.keys()):
            # renamed by a wrapper, such as an adapter
            if id(before.layers[name].weight_view.present) in weights:
                continue
            self.note(
                (name, "gone"),
                f"{label}: the weight of layer ",
                name,
                " is no longer a parameter of the model that is trained: it was removed, replaced, "
                f"pruned or parametrised after {label} was made. {then}",
            )

    def note_nothing_trained(self, binding: Binding, known: set[str]) -> None:
        """Warn once if no parameter of the groups has a gradient.

        If so, the model has got other parameters since, or another model runs.
        """
        plan, label, step = binding.plan, self.label, binding.groups[0]["step"]
        if any(p.grad is not None for p in parameters(binding.groups)):
            return
        named = ((name, p) for name, p in plan.model.named_parameters() if name not in known)
        new = [name for name, p in named if p.requires_grad and id(p) not in binding.group_of]
        if new:
            remedy = (
                f"{_untrained(new)} Where an adapter was added (LoRA), make it first: "
                f"peft.get_peft_model(model, ...), then the optimizer"
            )
        elif step == LR_JUDGED[1] and not any(layer.refreshes for layer in plan.layers.values()):
            remedy = (
                f"Call the model that {label} was made for, of which a copy has parameters of its "
                f"own, and loss.backward() before each step()"
            )
        else:  # such as one of two optimizers that take turns
            return
        self.note(
            "nothing trained",
            f"{label}, step {step - 1}: no parameter in its groups has a gradient, so nothing is "
            f"trained. {remedy}",
        )

    def note_lr(
        self, groups: Sequence[dict[str, Any]], usual: float, is_trained: Callable[[], bool]
    ) -> None:
        """Warn of a learning rate that is for another optimizer.

        It is far above the usual one, or below it and not growing (as in a warm-up). A network that
        was trained before takes smaller ones.
        """
        label = self.label
        # the highest one of torch's schedulers, as a rule
        lr = max(max(float(group["lr"]), float(group.get("initial_lr", 0.0))) for group in groups)
        if groups[0]["step"] == LR_JUDGED[0]:
            self.first_lr = lr
        elif lr > 10 * usual:
            self.note(
                "lr",
                f"{label}: lr={lr:g} is above {10 * usual:g}, ten times that for new networks. "
                f"Start with {usual:g}, or leave lr out",
            )
        elif 0 < lr < usual / 10 and lr <= self.first_lr:
            trained = is_trained()
            least, start = (REST, LEARNED) if trained else (0.1, NEW)
            if lr < least * usual:
                what = "networks that are trained already" if trained else "new networks"
                self.note(
                    "lr",
                    f"{label}: lr={lr:g} is below {least * usual:g}, the least for {what}. If it "
                    f"is a trainer's, for Adam, leave lr out, or start with "
                    f"learning_rate={start * usual:g}",
                )


def _untrained(names: Sequence[str]) -> str:
    return (
        f"In no parameter group, and so not trained, are {some(names)}: give them to "
        f"optimizer.add_param_group({{'params': [...]}}), or make the optimizer again."
    )
