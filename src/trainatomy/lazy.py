"""Packages whose names are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def names_of(package: str, modules: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the module and the name there of each name of a package.

    Args:
        package: The package.
        modules: Names by the module that has them, within ``trainatomy``; ``read as read_workload`` renames.
    """
    found = {}
    for module, names in modules.items():
        for name in names.split(", "):
            there, _, here = name.partition(" as ")
            found[here or there] = (f"{package.partition('.')[0]}.{module}", there)
    return found


def lazy(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], Sequence[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package; the arguments are those of ``names_of``.

    Type checkers read the package's ``__init__.pyi``, which ``docs/generate.py`` writes.
    """
    places = names_of(package, modules)

    def get(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, there = places[name]
        value: object = getattr(import_module(module), there)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *places}), sorted(places)
