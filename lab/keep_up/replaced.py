"""Which attributes of other libraries the package replaces while it predicts: recorded, as the cases are predicted."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from named_sources import LIBRARIES


@contextmanager
def recorded_replacements() -> Iterator[set[str]]:
    """Yield a set of dotted names, to which each attribute that is replaced meanwhile is added."""
    names: set[str] = set()
    patch: Any = type(mock.patch.object(mock, "MagicMock"))
    enter = patch.__enter__

    def recorded(patcher: Any) -> Any:
        name = _name_of(patcher.getter())
        if name.partition(".")[0] in LIBRARIES:
            names.add(f"{name}.{patcher.attribute}")
        return enter(patcher)

    with mock.patch.object(patch, "__enter__", recorded):
        yield names


def _name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else ""
