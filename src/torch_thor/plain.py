"""Numbers as Python has them, in which form every format of checkpoints keeps them."""

import numbers
from typing import Any


def plain(value: Any) -> Any:
    """Return a number of NumPy, or a tensor of one integer or flag, as a number of Python.

    So are those in a list, a tuple, a dict or an array. All else is returned as it is, tensors of
    floating-point numbers too: schedulers change a learning rate that is a tensor in place.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "is_meta"):  # a tensor; torch takes seconds to import
        is_number = value.numel() == 1 and not (value.is_floating_point() or value.is_complex())
        return value.item() if is_number and not value.is_meta else value
    if isinstance(value, list | tuple):
        members = [plain(member) for member in value]
        same = all(new is old for new, old in zip(members, value, strict=True))
        return value if same else tuple(members) if isinstance(value, tuple) else members
    if type(value) is dict:
        entries = {key: plain(member) for key, member in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    if getattr(value, "ndim", None) in (0, 1):
        return plain(value.tolist()) if type(value.tolist()) is not type(value) else float(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
