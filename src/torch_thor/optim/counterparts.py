"""Options of other optimizers, and what stands in the place of each here.

An option that an optimizer does not have is refused with its counterpart, as a keyword and in a
parameter group. Other keys of groups are none of ours: trainers and schedulers keep theirs there.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")

_KERNELS = "none is needed: the kernels follow from the device and the dtype, so leave it out"

# Arguments of other constructors, which stand in no parameter group: groups may have such keys.
_ARGUMENTS = {
    "net": "the model is the first argument",
    "batch_size": "none is needed; the attribute loss_terms sets it, after construction",
    "loss_scale": "torch.amp.GradScaler scales the loss",
    "split_indices": "it has no counterpart: all statistics are sent as one buffer",
    "decay_filter": "torch_thor.param_groups makes groups with and without weight decay",
    "exclude": 'layers="-NAME" leaves layers out; torch_thor.param_groups those without decay',
    "skip_layers": 'layers="-NAME" leaves layers out',
    "accumulation_steps": "none is needed: the passes of a step are counted",
    "grad_scaler": "none is needed with torch.amp.GradScaler; the attribute names another one",
    "compute_method": "it has no counterpart: blocks are inverted by Cholesky factorisations",
    "grad_worker_fraction": "distributed=Distributed(divide_curvature=True) divides the curvature",
    "loss_terms": "it is an attribute: optimizer.loss_terms = n, after construction",
    "row_mask": "it is an attribute: optimizer.row_mask = mask, before each forward pass",
    "nonfinite": 'it is an attribute: optimizer.nonfinite = "skip", after construction',
    **dict.fromkeys(
        ("process_group", "divide_curvature", "whole_matrices", "communication_dtype"),
        "it is an option of distributed=torch_thor.Distributed(...)",
    ),
}

# of all that are here
_COMMON = {
    "learning_rate": "lr= is the learning rate",
    "lr_decay": "a scheduler of torch.optim.lr_scheduler stands in its place",
    "wd": "weight_decay= is the weight decay",
    "use_nesterov": "nesterov= switches on Nesterov's momentum, where there is one",
    "fused": _KERNELS,
    "capturable": "it has no counterpart: a step reads numbers, so no CUDA graph can capture it",
    "differentiable": "it has no counterpart: a step runs without autograd",
    "amsgrad": "it has no counterpart: no maximum of second moments is kept",
    "rho": "it has no counterpart: SAM's radius is that of a wrapper, and Adadelta's of Adadelta",
    "max_grad_norm": "torch.nn.utils.clip_grad_norm_ clips before step()",
    "clip_grad": "torch.nn.utils.clip_grad_norm_ clips before step()",
}

# of THOR and ThorMuon
_CURVATURE = {
    **_COMMON,
    **_ARGUMENTS,
    "foreach": _KERNELS,
    "maximize": "it has no counterpart: call (-loss).backward()",
    **dict.fromkeys(
        ("dampening", "dampen_first"),
        "it has no counterpart: the momentum is v ← μ v + d, with momentum= for μ",
    ),
    "alpha": "factor_decay= is the weight of the old curvature in a running average",
    "beta": "momentum= is the decay rate of the momentum",
    "beta1": "momentum= is the decay rate of the momentum",
    "beta2": "factor_decay= is the counterpart in the curvature",
    "centered": "it has no counterpart: curvature is a second moment about zero",
    "initial_accumulator_value": "it has no counterpart: the first step takes all curvature anew",
    "trust_coefficient": "max_update_ratio= bounds a step relative to its weight",
    "clip_factor": "max_update_ratio= bounds a step relative to its weight",
    # of Shampoo and SOAP
    "shampoo_beta": "factor_decay= is the weight of the old curvature, over refreshes",
    "precondition_frequency": "update_interval= is the number of steps between two refreshes",
    "max_precond_dim": "split_dim= cuts large factors into blocks",
    "max_preconditioner_dim": "split_dim= cuts large factors into blocks",
    "merge_dims": "it has no counterpart: a convolution is the matrix weight.flatten(1)",
    "precondition_1d": "it has no counterpart: vectors have no factors of their own",
    "normalize_grads": "it has no counterpart: max_update_ratio= bounds the length of a step",
    # of K-FAC
    "factor_update_steps": "update_interval= is the number of steps between two refreshes",
    "inv_update_steps": "update_interval= is the number of steps between two refreshes",
    "TCov": "update_interval= is the number of steps between two refreshes",
    "TInv": "update_interval= is the number of steps between two refreshes",
    "stat_decay": "factor_decay= is the weight of the old factors in a running average",
    # of MindSpore's THOR
    "frequency": "update_interval= is the number of steps between two refreshes",
    "enable_clip_grad": "max_update_ratio= bounds a step relative to its weight",
}
_ROUNDS = ("ns_steps", "ns_coefficients", "backend", "backend_steps")
_ORTHOGONAL = (*_ROUNDS, "adjust_lr_fn", "use_muon")
_ADAMW = ("adamw_params", "adamw_lr", "adamw_betas", "adamw_eps", "adamw_wd", "muon_params")

THOR = {
    **_CURVATURE,
    "betas": "momentum= is β1, and factor_decay= the counterpart of β2 in the curvature",
    "eps": "damping= stands in its place, on the diagonals of the factors",
    **dict.fromkeys(
        (*_ORTHOGONAL, *_ADAMW),
        "it has no counterpart, because THOR orthogonalises nothing: torch_thor.ThorMuon does",
    ),
    "auto_lr": "it has no counterpart: a learning rate counts as it is",
}
THOR_MUON = {
    **_CURVATURE,
    "betas": "momentum= is β1, and factor_decay= the counterpart of β2 in the curvature; AdamW has "
    "(0.9, 0.95) for what is no matrix",
    "eps": "damping= stands in its place, relative to the mean diagonal of the curvature",
    **dict.fromkeys(
        _ROUNDS,
        "none is needed: the polar factors are exact on a CPU, and of six rounds elsewhere",
    ),
    "adjust_lr_fn": 'it has no counterpart: lr= has the meaning that it has with "original"',
    "use_muon": 'none is needed: matrices are found; layers="-NAME" gives a layer to AdamW',
    **dict.fromkeys(
        _ADAMW,
        "none is needed: give all parameters; what is no matrix is trained by AdamW at 0.2 lr with "
        "betas (0.9, 0.95), and a group may have an lr= and a weight_decay= of its own",
    ),
    "kl_clip": "max_update_ratio= bounds the step of each matrix",
    "trace_thresholds": "it has no counterpart: a layer whose trace has changed by 1 % or less "
    "keeps its factor",
    "loss_reduction": "none is needed: the step does not depend on the scale of the loss",
    "fisher": "it has no counterpart: the curvature is that of the inputs alone",
}

_OF_MODEL = ("layers", "loss_reduction", "fisher", "distributed")  # arguments, as well
_WITHOUT_CURVATURE = {
    **_COMMON,
    **dict.fromkeys(
        (
            *("damping", "update_interval", "trace_thresholds", "split_dim", "factor_decay"),
            *("max_update_ratio", "kl_clip", *_OF_MODEL, *_ORTHOGONAL),
        ),
        "it has no counterpart without curvature, which torch_thor.ThorMuon and THOR have",
    ),
}
LAMB = {
    **_WITHOUT_CURVATURE,
    "momentum": "betas= has it as β1",
    "nesterov": "it has no counterpart: the first moment is used as it is",
    **dict.fromkeys(
        ("dampening", "dampen_first"), "betas= has it as β1: the first moment is a running average"
    ),
    "beta1": "betas= is the pair (β1, β2)",
    "beta2": "betas= is the pair (β1, β2)",
    "alpha": "betas= has it as β2",
    "trust_coefficient": "it has no counterpart: lr= multiplies the trust ratio",
    "trust_clip": "it has no counterpart: the trust ratio has no bound",
    "clamp_value": "it has no counterpart: norms are taken as they are",
    "always_adapt": "exclude=() gives every parameter a trust ratio",
    "bias_correction": "it has no counterpart: the moments are always corrected",
    "clip_factor": "torch_thor.adaptive_clip_grad_ clips before step()",
}
AGC_SGD = {
    **_WITHOUT_CURVATURE,
    "betas": "momentum= is β1; there is no second moment",
    "beta1": "momentum= is β1",
    "beta2": "it has no counterpart: there is no second moment",
    "alpha": "it has no counterpart: there is no second moment",
    "clipping": "clip_factor= is λ",
    "clip_grad": "clip_factor= is λ",
}


def refused(optimizer: Any, values: Mapping[str, Any]) -> str:
    """Return why an optimizer refuses options, and what stands in their place; empty if none is."""
    known, label = optimizer.counterparts, optimizer.__name__
    return "; and ".join(
        f"{name}={value!r}: {label} has no option {name}; {known[name]}"
        for name, value in values.items()
        if name in known
    )


def check_group(optimizer: type, group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of another optimizer in a parameter group."""
    asked = {
        name: value
        for name, value in group.items()
        if not (name in known or name in _ARGUMENTS or name in _OF_MODEL) and _asks(name, value)
    }
    if message := refused(optimizer, asked):
        raise ValueError(message)


def _asks(name: str, value: Any) -> bool:
    """Return whether the value of an option asks for anything; that of use_muon does."""
    # groups that another optimizer has completed are full of None, False and 0
    is_off = value is None or (isinstance(value, int | float) and not value)
    return name == "use_muon" or not is_off


def names_counterparts(init: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor refuse keywords of other optimizers with their counterparts."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        foreign = {name: value for name, value in options.items() if name not in known}
        if foreign and (message := refused(type(args[0]), foreign)):
            raise TypeError(message)
        init(*args, **options)

    return checked
