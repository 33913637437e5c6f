"""A pretend accelerator: counts the kernels of a program, and where it waits for the device.

Its tensors hold their numbers in tensors of the CPU. Kernels are counted as torch dispatches them,
and everything that would make the host wait for a real device is noted: reads of numbers, copies to
the host, copies from memory that is not pinned, operations whose result has a shape that the host
must know, and factorisations that look whether they have succeeded.

The device can be registered once in a process, and from then on `torch.accelerator` believes in
it. So tests run in a process of their own: `run(function, *arguments)`.
"""

import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "toy"
# What a device does without a kernel.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "flatten", "is_same_size", "lift_fresh", "new_empty",
    "new_empty_strided", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as_real",
}  # fmt: skip
# What the host waits for, by its name; what depends on the arguments is in `_waits`.
WAITS = {
    "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "_local_scalar_dense", "_unique2",
    "allclose", "bincount", "cholesky", "cholesky_inverse", "equal", "is_nonzero", "linalg_eig",
    "masked_select", "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip

_original = {
    "tensor": torch.tensor,
    "empty": torch.empty,
    "tolist": torch.Tensor.tolist,
}


class Record:
    """What a program did: kernels by name, and where it waited."""

    def __init__(self):
        self.operations, self.synchronisations = Counter(), []

    @property
    def kernels(self):
        return sum(count for name, count in self.operations.items() if name not in VIEWS)

    def wait(self, what):
        lines = [line for line in traceback.extract_stack() if "/torch_thor/" in line.filename]
        where = f"{lines[-1].filename.split('torch_thor/')[-1]}:{lines[-1].lineno}" if lines else ""
        self.synchronisations.append(f"{what} {where}".strip())


_records = [Record()]


@contextmanager
def recorded():
    """Record what is done in the block."""
    _records.append(Record())
    try:
        yield _records[-1]
    finally:
        _records.pop()


class Pretend(torch.Tensor):
    """A tensor on the pretend accelerator; its numbers are in `raw`, on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    has_float64 = True  # as MPS has not

    @staticmethod
    def __new__(cls, raw):
        if raw.dtype == torch.float64 and not cls.has_float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=f"{NAME}:0",
        )  # fmt: skip
        made.raw = raw
        return made

    def __init__(self, raw):
        pass

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return _dispatch(function, arguments, options or {})


class Device(TorchDispatchMode):
    """Takes the calls that make tensors on the pretend accelerator from nothing."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        pretends = any(isinstance(x, Pretend) for x in tree_leaves((arguments, options)))
        if pretends or _is_pretend(options.get("device")):
            return _dispatch(function, arguments, options)
        return function(*arguments, **options)


def _is_pretend(device):
    return device is not None and torch.device(device).type == NAME


def _raw(value):
    return value.raw if isinstance(value, Pretend) else value


def _dispatch(function, arguments, options):
    """Compute on the CPU what a call asks of the device, and note it."""
    name = function.overloadpacket.__name__
    tensors = [x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)]
    ours = {id(x.raw): x for x in tensors if isinstance(x, Pretend)}
    on_host = [x for x in tensors if not isinstance(x, Pretend)]
    copies = name in ("_to_copy", "copy_")
    if ours and not copies and any(x.dim() for x in on_host):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has others")
    _note(function, name, arguments, options)
    to_host = _copies_to_host(name, arguments, options)
    taken = dict(options)
    if _is_pretend(taken.get("device")):
        taken["device"] = "cpu"
    result = function(*tree_map(_raw, arguments), **tree_map(_raw, taken))
    if name == "copy_" and not isinstance(arguments[0], Pretend):
        return arguments[0]
    if to_host or not (ours or _is_pretend(options.get("device"))):
        return result

    def wrapped(value):
        if not isinstance(value, torch.Tensor):
            return value
        return ours[id(value)] if id(value) in ours else Pretend(value)

    return tree_map(wrapped, result)


def _copies_to_host(name, arguments, options):
    if name == "copy_":
        return not isinstance(arguments[0], Pretend)
    device = options.get("device")
    return name == "_to_copy" and device is not None and not _is_pretend(device)


def _note(function, name, arguments, options):
    """Count a call, and note whether the host waits for it."""
    record = _records[-1]
    record.operations[name] += 1
    if name.startswith("_foreach") and not _is_one_kernel(arguments):
        record.operations[name] += len(arguments[0]) - 1
    if name in WAITS or _waits(function, name, arguments):
        record.wait(name)
    elif _copies_to_host(name, arguments, options):
        if name != "copy_" or not (_is_pinned(arguments[0]) and _non_blocking(arguments, options)):
            record.wait("copy to the host")
    elif name in ("copy_", "_to_copy"):
        source = arguments[1] if name == "copy_" else arguments[0]
        if not isinstance(source, Pretend) and source.dim() and not _is_pinned(source):
            record.wait("copy from memory that is not pinned")


def _is_one_kernel(arguments):
    """Return whether tensors and the tensors that belong to them have the same shapes."""
    others = arguments[1] if len(arguments) > 1 else None
    if not isinstance(others, list | tuple) or not isinstance(others[0], torch.Tensor):
        return True
    pairs = zip(arguments[0], others, strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _waits(function, name, arguments):
    if name in ("index", "index_put", "index_put_"):
        return any(x is not None and x.dtype == torch.bool for x in arguments[1])
    return name == "repeat_interleave" and function._overloadname.startswith("Tensor")


def _non_blocking(arguments, options):
    return bool(options.get("non_blocking") or (len(arguments) > 2 and arguments[2]))


def _is_pinned(tensor):
    return getattr(tensor, "pretends_pinned", False)


def _made(kind):
    """Return `torch.tensor` or `torch.empty` with memory that pretends to be pinned."""

    def make(*arguments, pin_memory=False, **options):
        if _is_pretend(options.get("device")) and kind == "tensor":
            _records[-1].wait("copy from memory that is not pinned")
            return Pretend(_original[kind](*arguments, **{**options, "device": "cpu"}))
        made = _original[kind](*arguments, **options)
        if pin_memory:
            made.pretends_pinned = True
        return made

    return make


def _tolist(tensor):
    if not isinstance(tensor, Pretend):
        return _original["tolist"](tensor)
    _records[-1].wait("tolist")
    return _original["tolist"](tensor.raw)


def _start():
    from torch.utils.backend_registration import (
        _DummyBackendModule,
        _setup_privateuseone_for_python_backend,
    )

    from torch_thor.curvature import blocks

    class Module(_DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.float16, torch.bfloat16]

    torch.set_num_threads(1)
    _setup_privateuseone_for_python_backend(NAME, Module())
    blocks.WITH_PINNED_MEMORY.add(NAME)
    torch.tensor, torch.empty = _made("tensor"), _made("empty")
    torch.Tensor.tolist = _tolist


@cache
def _process():
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start)


def run(function, *arguments, **options):
    """Return what a function of a test module returns, or raise what it raises, on the device."""
    return _process().submit(_with_device, function, arguments, options).result()


def _with_device(function, arguments, options):
    with Device():
        return function(*arguments, **options)


def moved(model):
    """Put the parameters and buffers of a model on the device; return the model."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = Pretend(parameter.detach().clone())
                trained = parameter.requires_grad
                module._parameters[name] = torch.nn.Parameter(new, requires_grad=trained)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Pretend(buffer.detach().clone())
    return model


def raw(tensor):
    """Return a tensor with its numbers on the CPU, without a copy that is counted."""
    return tensor.raw if isinstance(tensor, Pretend) else tensor
