"""The precision of all arithmetic with factors: their dtype, and the settings of torch for matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

# The number of multiplications from which oneDNN is faster in spite of its overhead (about 10 microseconds).
_LARGE_PRODUCT = 2**20
# The setting that allows oneDNN to use bfloat16, which it does only on processors with matrix tiles (AMX).
_ONEDNN = "bf16"


def factor_dtype(parameter_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors, inverses and momentum for a parameter."""
    if parameter_dtype.is_complex:
        return parameter_dtype
    return torch.float64 if parameter_dtype == torch.float64 else torch.float32


@contextmanager
def ieee_float32(device_type: str) -> Iterator[None]:
    """Run float32 matrix products in IEEE float32: no autocast, no TF32, no bfloat16 passes."""
    # the stubs of torch 2.15 do not know torch.backends.mkldnn.matmul
    matmul: Any = (torch.backends.mkldnn if device_type == "cpu" else torch.backends.cuda).matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        matmul.fp32_precision = before


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, computed by the faster library. Must be called inside :func:`ieee_float32`."""
    if not _is_faster_in_onednn(a, b):
        return torch.bmm(a, b)
    with _onednn():
        return torch.bmm(a, b)


def add_product_(into: Tensor, a: Tensor, b: Tensor, decay: float = 1.0, scale: float = 1.0) -> None:
    """Compute ``into ← decay * into + scale * a @ b`` with the library that :func:`product` uses."""
    if into.stride(-1) != 1 and into.stride(-2) == 1:  # oneDNN is a hundred times slower on a column-major result
        into, a, b = into.mT, b.mT, a.mT
    if into.stride(-1) != 1 or not _is_faster_in_onednn(a, b):
        into.baddbmm_(a, b, beta=decay, alpha=scale)
        return
    with _onednn():
        into.baddbmm_(a, b, beta=decay, alpha=scale)


def _is_faster_in_onednn(a: Tensor, b: Tensor) -> bool:
    if a.dtype != torch.float32 or a.device.type != "cpu" or a.numel() * b.shape[-1] < _LARGE_PRODUCT:
        return False
    # oneDNN has no fast path for matrices without a contiguous dimension
    return 1 in a.stride()[-2:] and 1 in b.stride()[-2:] and _onednn_is_exact()


@contextmanager
def _onednn() -> Iterator[None]:
    """Make torch multiply float32 matrices with oneDNN."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # as in ieee_float32
    before, matmul.fp32_precision = matmul.fp32_precision, _ONEDNN
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _onednn_is_exact() -> bool:
    """Return whether oneDNN multiplies in float32 on this machine although bfloat16 is allowed."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    with _onednn():
        for rows, inner, columns in ((128, 128, 128), (128, 1024, 128), (512, 64, 512)):
            a, b = (torch.rand(2, *shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
            error = torch.bmm(a, b).double() - torch.bmm(a.double(), b.double())
            if float(error.abs().max()) > 1e-6 * inner:  # bfloat16 numbers up to 1 have rounding errors up to 0.002
                return False
    return True
