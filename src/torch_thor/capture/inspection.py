"""The inspection of a model: the layers that can be preconditioned, and each parameter's layer.

For every parameter it finds which layer has it, or why none does.

A layer is one or several modules that share a weight, with a kind that is registered for their
class (:mod:`torch_thor.curvature.kinds`), or one of the layers inside a composite module
(:mod:`torch_thor.capture.composites`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torch_thor.capture.composites import composite_of
from torch_thor.capture.coverage import LEFT_OUT, NORM, NOT_TRAINED, Covered
from torch_thor.capture.layers import Inside, Owner, owners_of
from torch_thor.capture.patterns import Patterns, selected
from torch_thor.capture.sharding import check_sharded, is_sharded, row_shards_of
from torch_thor.curvature.geometry import Geometry, matrix_of
from torch_thor.curvature.kinds import Kind, class_name_of, kind_of, parameter_names_of, why_not
from torch_thor.curvature.layer import Layer
from torch_thor.curvature.layout import why_not_by_rows
from torch_thor.curvature.view import ParameterView

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


class Inspection:
    """The layers of a model, and how each of its parameters is trained.

    Args:
        model: the model.
        trained: the parameters of the optimizer.
        chosen: the option ``layers``.
        matrices_alone: whether A alone is used (ThorMuon): of layers whose A is a full matrix, and
            for no bias.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[Tensor],
        *,
        chosen: Patterns = None,
        matrices_alone: bool = False,
    ) -> None:
        trained = list(trained)
        check_sharded(model, trained)
        self._model = model
        self._owners = owners_of(model)
        self._reasons: dict[int, str] = {}  # why parameters are not preconditioned, by their `id`
        self.layers: dict[str, Layer] = {}  # the layers to precondition, by name
        self._look_at_parameters({id(p) for p in trained})
        self._find_called_layers()
        self._find_inner_layers()
        norms = {}
        for name, module in model.named_modules():
            if _is_norm(module) and any(
                id(p) not in self._reasons for p in module.parameters(recurse=False)
            ):
                norms[name] = module
        # Normalisation layers are never preconditioned, but layers="-*norm*" must not be refused as
        # matching nothing.
        candidates = {name: layer.weight.module for name, layer in self.layers.items()} | norms
        kept = (
            candidates.keys() if chosen is None else selected("layers", chosen, candidates, "layer")
        )
        # the layers that `layers=` leaves out
        self.left_out = [self.layers.pop(name) for name in list(self.layers) if name not in kept]
        for layer in self.left_out:
            others = [] if layer.inside else layer.weight.module.parameters(recurse=False)
            for p in (*(view.parameter for view in (layer.weight, *layer.biases)), *others):
                self._reasons.setdefault(id(p), LEFT_OUT)
        self._leave_out_sharded()
        for name, norm in norms.items():
            for p in norm.parameters(recurse=False):
                self._reasons.setdefault(id(p), NORM if name in kept else LEFT_OUT)
        # the parameters that are matrices without factors, by name
        self.matrices: dict[str, Geometry] = self._take_matrices_alone() if matrices_alone else {}
        # one entry per parameter, in the model's order
        self.entries = self._entries(matrices_alone)

    # ---- the layers ------------------------------------------------------------------------------

    def _look_at_parameters(self, trained: set[int]) -> None:
        """Find the parameters that cannot be preconditioned, whatever their layer's kind is."""
        for key, (owner, *_) in self._owners.items():
            for name, value in vars(owner.module).items():
                if isinstance(value, Tensor) and owner.attribute in (
                    f"{name}_orig",
                    f"{name}_g",
                    f"{name}_v",
                ):
                    why = (
                        f"{name!r} is computed from it (pruned, weight_norm): its gradient is not "
                        "the weight's"
                    )
                    self._reasons[key] = why
        for name, parameter in self._model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"parameter {name!r} has no shape yet; run one batch through the lazy module "
                    "before THOR is made"
                )
            if id(parameter) not in trained:
                self._reasons[id(parameter)] = NOT_TRAINED
            elif not parameter.is_floating_point():
                self._reasons[id(parameter)] = (
                    f"{parameter.dtype} is not a real floating-point type"
                )

    def _find_called_layers(self) -> None:
        """Find the layers that are modules, one per weight."""
        # Modules that share a weight are one layer.
        # modules inside a composite module that hold weights of its layers
        uncalled: set[int] = set()
        for module in self._model.modules():
            composite, _ = composite_of(module)
            if composite is not None and composite.with_children:
                uncalled.update(map(id, list(module.modules())[1:]))
        for parameter in self._model.parameters():
            key, sharing = id(parameter), self._owners[id(parameter)]
            if key in self._reasons or not all(
                o.is_weight and not _is_norm(o.module) for o in sharing
            ):
                continue
            if any(id(o.module) in uncalled for o in sharing):
                continue
            known = [(o, kind) for o in sharing if (kind := kind_of(o.module)) is not None]
            group = _one_layer(known) if len(known) == len(sharing) else []
            if group:
                first, kind = group[0]
                biases = self._biases_of(kind, [ParameterView(o.module, o.bias) for o, _ in group])
                weight = ParameterView(first.module, first.attribute)
                modules = [(o.module, k) for o, k in group]
                self.layers[first.module_name] = Layer(
                    first.module_name, kind, weight, biases, modules=modules
                )
            elif len(sharing) > 1:
                self._reasons[key] = _shared_by(sharing)

    def _find_inner_layers(self) -> None:
        """Find the layers inside composite modules, but for weights of layers that are modules."""
        taken = {id(layer.weight.parameter) for layer in self.layers.values()}
        biases: list[ParameterView] = []  # of weights that are not preconditioned
        for module_name, module in self._model.named_modules():
            composite, why = composite_of(module)
            if composite is None:
                continue
            if why is not None:
                for p in module.parameters(recurse=composite.with_children):
                    self._reasons.setdefault(id(p), why)
                continue
            for inner in composite.layers_of(module):
                weight, key = inner.weight.present, id(inner.weight.present)
                if weight is not None and len(self._owners[key]) > 1:
                    self._reasons.setdefault(key, _shared_by(self._owners[key]))
                # none where it is computed from other parameters (pruning, a parametrization)
                if weight is None or key in self._reasons or key in taken:
                    biases += [bias for bias in inner.biases if bias.present is not None]
                    continue
                name = f"{module_name}.{inner.name}".lstrip(".")
                inside = Inside(module, inner.name, composite.hook)
                own = self._biases_of(inner.kind, inner.biases)
                self.layers[name] = Layer(
                    name, inner.kind, inner.weight, own, inner.prefix, inside=inside
                )
        for bias in biases:
            if len(self._owners[id(bias.parameter)]) == 1:
                self._reasons.setdefault(
                    id(bias.parameter), "the weight of its layer is not preconditioned"
                )

    def _biases_of(self, kind: Kind, views: Sequence[ParameterView]) -> list[ParameterView]:
        """Return the biases that are preconditioned with their layer."""
        biases = [view for view in views if view.present is not None]
        if not kind.solves_biases:
            why = f"G of {kind.label} does not apply to its bias"
            self._reasons.update({id(bias.parameter): why for bias in biases})
        return [
            b
            for b in biases
            if (key := id(b.parameter)) not in self._reasons and len(self._owners[key]) == 1
        ]

    def _leave_out_sharded(self) -> None:
        """Leave out the layers that cannot be preconditioned in shards."""
        for name, layer in list(self.layers.items()):
            weight = layer.weight.parameter
            if row_shards_of(weight) is None:
                continue
            why = why_not_by_rows(layer.kind, tuple(weight.shape))
            if why is not None:
                del self.layers[name]
                self._reasons.update(
                    {id(view.parameter): why for view in (layer.weight, *layer.biases)}
                )
            # its G is that of all outputs, and the bias is divided among processes
            elif layer.kind.transposed:
                why = "divided among processes, and the rows of the weight are inputs"
                self._reasons.update({id(bias.parameter): why for bias in layer.biases})
                layer.biases.clear()

    def _take_matrices_alone(self) -> dict[str, Geometry]:
        """Leave out what has no full A, and return the trained matrices without factors."""
        # The result holds only parameters that are trained.
        vectors = set()
        for name, layer in list(self.layers.items()):
            for bias in layer.biases:
                self._reasons.setdefault(
                    id(bias.parameter), "it has no A" if layer.kind.routed else "no matrix"
                )
                # a bias is no matrix, whatever its shape, unless it has one row per expert
                if not layer.kind.routed:
                    vectors.add(id(bias.parameter))
            layer.biases.clear()
            if layer.kind.diagonal_input:
                self._reasons.setdefault(id(layer.weight.parameter), "the input factor is diagonal")
                del self.layers[name]
        weights = {id(layer.weight.parameter) for layer in self.layers.values()}
        found = {}
        for name, parameter in self._model.named_parameters():
            key = id(parameter)
            if (
                key in weights
                or key in vectors
                or self._reasons.get(key) in (LEFT_OUT, NOT_TRAINED, NORM)
            ):
                continue
            matrices = [matrix_of(o.module, o.attribute, parameter) for o in self._owners[key]]
            first = matrices[0]
            if first is None or None in matrices:
                continue
            if not is_sharded(parameter) or first.of_rows(len(parameter), 1) is not None:
                found[name] = first
        return found

    # ---- the entries of coverage() ---------------------------------------------------------------

    def _entries(self, matrices_alone: bool) -> list[Covered]:
        layers, left_out = _by_parameter(self.layers.values()), _by_parameter(self.left_out)
        entries = []
        for name, parameter in self._model.named_parameters():
            key, shape, rest = id(parameter), tuple(parameter.shape), "plain momentum"
            owner, *others = self._owners[key]
            if matrices_alone:
                rest = (
                    "orthogonalised momentum" if key in layers or name in self.matrices else "AdamW"
                )
            if key not in layers:
                reason = (
                    self._reasons.get(key)
                    or self._why_tied(self._owners[key])
                    or _why_plain(owner, others)
                )
                label, trained = class_name_of(owner.module), reason != NOT_TRAINED
                entries.append(
                    Covered(name, shape, label, reason=reason, trained=trained, rest=rest)
                )
                continue
            kind, is_weight = layers[key][0].kind, layers[key][0].weight.parameter is parameter
            sizes = (
                (kind.inputs, kind.outputs)[: 1 if matrices_alone else 2]
                if is_weight
                else (kind.outputs,)
            )
            notes = [f"shared with {', '.join(repr(o.name) for o in others)}"] if others else []
            notes += [f"{rest} for {layer.name!r}: {LEFT_OUT}" for layer in left_out.get(key, ())]
            groups, note = kind.groups * len(layers[key]), "; ".join(notes) or None
            entries.append(Covered(name, shape, kind.label, sizes, groups, note=note, rest=rest))
        return entries

    def _why_tied(self, owners: Sequence[Owner]) -> str | None:
        """Return the reason for the bias of a decoder that is tied to an embedding."""
        # The weight of such a decoder is preconditioned as that of the embedding.
        for owner in owners:  # BERT's bias has two: the decoder, and the head around it
            weight = getattr(owner.module, parameter_names_of(owner.module)[0], None)
            if owner.attribute == owner.bias and weight is not None:
                for layer in self.layers.values():
                    modules = [module for module, _ in layer.modules]
                    if layer.weight.parameter is weight and modules and owner.module not in modules:
                        return (
                            f"the weight of its layer is preconditioned as that of {layer.name!r}, "
                            "with another G"
                        )
        return None


def _one_layer(sharing: list[tuple[Owner, Kind]]) -> list[tuple[Owner, Kind]]:
    """Return the modules whose rows make the factors of a shared weight."""
    # There are none where their geometries do not fit.
    # Modules of one geometry pool their rows. An embedding and the linear decoder that is tied to
    # it are treated as the embedding, as in the reference implementation: a row of the weight is a
    # token in both, and the embedding's A, the token frequencies, is exact and cheap, where the
    # decoder's G would be vocabulary by vocabulary.
    if len({(type(k), k.groups, k.inputs, k.outputs) for _, k in sharing}) == 1:
        return sharing
    embeddings = [(o, k) for o, k in sharing if isinstance(o.module, nn.Embedding)]
    return (
        embeddings
        if all(isinstance(o.module, nn.Embedding | nn.Linear) for o, _ in sharing)
        else []
    )


def _is_norm(module: nn.Module) -> bool:
    # Those of model libraries too (LlamaRMSNorm, T5LayerNorm), so that coverage() calls them
    # normalisation layers.
    by_name = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    own = list(module.parameters(recurse=False))
    return isinstance(module, _NORMS) or (by_name and bool(own) and all(p.dim() == 1 for p in own))


def _shared_by(owners: Sequence[Owner]) -> str:
    return f"shared by {', '.join(repr(owner.name) for owner in owners)}"


def _by_parameter(layers: Iterable[Layer]) -> dict[int, list[Layer]]:
    found: defaultdict[int, list[Layer]] = defaultdict(list)
    for layer in layers:
        for view in (layer.weight, *layer.biases):
            found[id(view.parameter)].append(layer)
    return dict(found)


def _why_plain(owner: Owner, others: Sequence[Owner]) -> str:
    """Return the reason for a parameter of which nothing more special is known."""
    module, label = owner.module, class_name_of(owner.module)
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return (
            "the weight is computed from it (a parametrization): its gradient is not the weight's"
        )
    if others:
        return "shared by several modules"
    if composite_of(module)[0] is not None:
        return f"belongs to no layer inside {label}"
    is_bias = owner.attribute == owner.bias
    rest = (
        "the weight of its layer is not preconditioned"
        if is_bias
        else f"not the weight or bias of {label}"
    )
    return why_not(module) or rest
