"""Public names of a package that are imported when they are first used (PEP 562)."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]], subpackages: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make the `__getattr__` and the `__dir__` of a package whose `__init__.py` imports nothing.

    Packages that import each other's modules can then all export names without an import cycle, and a name costs the
    import of its own module only. A type checker does not see these names: the package imports them for it under
    `TYPE_CHECKING`, and lists them in `__all__`.

    Args:
        package: The full name of the package.
        modules: For each module, by its full name, the names that the package exports from it. A name may also be a
            module inside of that package.
        subpackages: Subpackages that are attributes of the package without having been imported.

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
