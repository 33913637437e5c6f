"""The one place where the precision of curvature arithmetic is chosen, and restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def factor_dtype(parameter_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors, inverses and momentum for a parameter.

    Half-precision factors lose the small eigenvalues that the damping is there to protect, so everything below
    float32 is raised to float32; float64 stays float64 (the oracles rely on it).

    Args:
        parameter_dtype: dtype of the weight.

    Returns:
        ``torch.float64`` for float64 weights, else ``torch.float32``; a complex dtype, which has no factors, as it is.
    """
    if parameter_dtype.is_complex:
        return parameter_dtype
    return torch.float64 if parameter_dtype == torch.float64 else torch.float32


@contextmanager
def ieee_float32(device_type: str) -> Iterator[None]:
    """Run float32 matrix products in IEEE float32: no autocast, no TF32, no bfloat16 passes.

    TF32 keeps 10 bits of mantissa, which is enough for a gradient and not for a factor that is about to be inverted.

    Args:
        device_type: device type of the tensors, for autocast (``"cpu"``, ``"cuda"``).

    Yields:
        Nothing; the caller's settings are back when the block is left, also on an exception.
    """
    # the stubs of torch 2.15 do not know torch.backends.mkldnn.matmul
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in matmuls]
    for backend in matmuls:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, precision in zip(matmuls, before, strict=True):
            backend.fp32_precision = precision
