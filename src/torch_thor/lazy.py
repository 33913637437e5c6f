"""Public names of a package that are imported on first use (PEP 562)."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]], subpackages: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` for a package whose `__init__.py` imports no module of it.

    A module is imported when one of its names is first used. Packages whose modules import each
    other can therefore export names without import cycles, and importing a package is fast. For
    type checkers the package must import the same names under `TYPE_CHECKING`, and list them in
    `__all__`.

    Args:
        package: The full name of the package.
        modules: Full module name to the names that the package exports from it. Where the module is
            a package, a name may be that of a module in it.
        subpackages: Names of modules and packages inside `package` that are imported when they are
            first used as its attributes.

    Returns:
        `__getattr__`, which raises `AttributeError` for all other names, and `__dir__`.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> object:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # as `from module import name` does it: a name that is a module is imported too
        value: object = getattr(__import__(homes[name], fromlist=[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *subpackages})

    return get, names
