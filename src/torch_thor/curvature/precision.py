"""The precision of all arithmetic with factors: their dtype, and the settings of torch for matrix products."""

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


class ieee_float32:  # noqa: N801  # read as a function: with ieee_float32("cpu"):
    """Run float32 matrix products in IEEE float32: no autocast, no TF32, no bfloat16 passes."""

    # a class, because entering and leaving a generator-based context manager takes longer than a small product

    def __init__(self, device_type: str) -> None:
        self._autocast = torch.autocast(device_type, enabled=False)
        # the stubs of torch 2.15 do not know torch.backends.mkldnn.matmul
        self._backend: Any = torch.backends.mkldnn if device_type == "cpu" else torch.backends.cuda

    def __enter__(self) -> None:
        matmul = self._backend.matmul
        self._before = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._autocast.__exit__(*error)
        self._backend.matmul.fp32_precision = self._before


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, computed by the faster library. Must be called inside :func:`ieee_float32`."""
    if not _is_faster_in_onednn(a, b):
        return torch.bmm(a, b)
    with _OneDnn():
        return torch.bmm(a, b)


def add_product_(into: Tensor, a: Tensor, b: Tensor, decay: float = 1.0, scale: float = 1.0) -> None:
    """Compute ``into ← decay * into + scale * a @ b`` with the library that :func:`product` uses."""
    if into.stride(-1) != 1 and into.stride(-2) == 1:  # oneDNN is a hundred times slower on a column-major result
        into, a, b = into.mT, b.mT, a.mT
    if into.stride(-1) != 1 or not _is_faster_in_onednn(a, b):
        into.baddbmm_(a, b, beta=decay, alpha=scale)
        return
    with _OneDnn():
        into.baddbmm_(a, b, beta=decay, alpha=scale)


def _is_faster_in_onednn(a: Tensor, b: Tensor) -> bool:
    if a.dtype != torch.float32 or a.device.type != "cpu" or a.numel() * b.shape[-1] < _LARGE_PRODUCT:
        return False
    # oneDNN has no fast path for matrices without a contiguous dimension
    return 1 in a.stride()[-2:] and 1 in b.stride()[-2:] and _onednn_is_exact()


class _OneDnn:
    """Make torch multiply float32 matrices with oneDNN."""

    def __enter__(self) -> None:
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # as in ieee_float32
        self._before = matmul.fp32_precision
        matmul.fp32_precision = _ONEDNN

    def __exit__(self, *error: object) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = self._before  # type: ignore[attr-defined]  # as in ieee_float32


@cache
def _onednn_is_exact() -> bool:
    """Return whether oneDNN multiplies in float32 on this machine although bfloat16 is allowed."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    with _OneDnn():
        for rows, inner, columns in ((128, 128, 128), (128, 1024, 128), (512, 64, 512)):
            a, b = (torch.rand(2, *shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
            error = torch.bmm(a, b).double() - torch.bmm(a.double(), b.double())
            if float(error.abs().max()) > 1e-6 * inner:  # bfloat16 numbers up to 1 have rounding errors up to 0.002
                return False
    return True
