"""Which modules own each parameter of a model, and which parameters no kind of layer can precondition."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torch_thor.capture.coverage import NOT_TRAINED
from torch_thor.curvature.kinds import parameter_names_of


@dataclass(frozen=True)
class Owner:
    """One place of a parameter in a model; a shared parameter has several."""

    module_name: str  # the name of the module that holds the parameter
    attribute: str  # the parameter's name in it
    module: nn.Module  # the module

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.module_name}.{self.attribute}".lstrip(".")

    @property
    def is_weight(self) -> bool:
        """Whether the parameter has the name of the module's weight."""
        return self.attribute == parameter_names_of(self.module)[0]

    @property
    def bias(self) -> str:
        """The name of the module's bias."""
        return parameter_names_of(self.module)[1]


Owners = Mapping[int, Sequence[Owner]]


def owners_of(model: nn.Module) -> Owners:
    """Find the owners of all parameters."""
    owners: defaultdict[int, list[Owner]] = defaultdict(list)
    for module_name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():  # modules may override named_parameters()
            if parameter is not None:
                owners[id(parameter)].append(Owner(module_name, attribute, module))
    return dict(owners)


def shared_by(owners: Sequence[Owner]) -> str:
    """Return the reason why a parameter of several owners is not preconditioned."""
    return f"shared by {', '.join(repr(owner.name) for owner in owners)}"


def reasons_of_parameters(model: nn.Module, owners: Owners, trained: Iterable[Tensor]) -> dict[int, str]:
    """Find the parameters that cannot be preconditioned, whatever the kind of their layer is."""
    reasons = _sources(owners)
    trained_ids = {id(p) for p in trained}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet; run one batch through the lazy module before THOR is made"
            )
        if id(parameter) not in trained_ids:
            reasons[id(parameter)] = NOT_TRAINED
        elif not parameter.is_floating_point():
            reasons[id(parameter)] = f"{parameter.dtype} is not a real floating-point type"
    return reasons


def _sources(owners: Owners) -> dict[int, str]:
    """Find parameters from which weights are computed: ``weight_orig`` (pruning), ``weight_g``, ``weight_v``."""
    reasons = {}
    for key, (owner, *_) in owners.items():
        for name, value in vars(owner.module).items():
            if isinstance(value, Tensor) and owner.attribute in (f"{name}_orig", f"{name}_g", f"{name}_v"):
                reasons[key] = f"{name!r} is computed from it (pruned, weight_norm): its gradient is not the weight's"
    return reasons
