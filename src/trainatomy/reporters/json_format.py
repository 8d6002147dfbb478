"""Formats of ``--json``: the fields of values as keys, with keys that are derived from them.

``schema.py`` describes a format from the same dataclasses and functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from trainatomy.records.create import to_plain

ABSENT: Any = object()
"""Default of a field that is a key only where it has another value."""

Key = str | Callable[[Any], Any]
"""A constant, or a function of the object, whose annotation says the type of what it returns."""
Written = TypeVar("Written")


@dataclass(frozen=True, slots=True)
class Derived:
    """Keys of an object besides its fields: those before them, and those after them or in place of one."""

    first: Mapping[str, Key] = field(default_factory=dict)
    last: Mapping[str, Key] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Format:
    """What a command prints with ``--json``.

    Attributes:
        name: Its name and version, the key ``schema``.
        title: What it describes.
        kind: The dataclass whose fields are its keys.
        view: Makes an instance of ``kind`` from the result; the result itself by default.
        keys: Further keys of objects, by their class.
    """

    name: str
    title: str
    kind: type
    view: Callable[[Any], Any] = lambda result: result
    keys: Mapping[type, Derived] = field(default_factory=dict)

    def write(self, result: object) -> dict[str, Any]:
        """Return the result as an object of plain JSON types."""
        return {"schema": self.name, **to_plain(self.view(result), self._keys_of)}

    def _keys_of(self, value: Any) -> dict[str, Any]:
        """Return the keys of an object with their values."""
        derived = self.keys.get(type(value), Derived())
        own = {each.name: getattr(value, each.name) for each in fields(value)}
        first, last = (
            {name: key(value) if callable(key) else key for name, key in some.items()}
            for some in (derived.first, derived.last)
        )
        return first | {name: held for name, held in own.items() if held is not ABSENT} | last


def view(kind: type[Written], result: object, /, **given: object) -> Written:
    """Return an instance of a dataclass with the given fields; others are attributes of the result, or absent."""
    needed = [each.name for each in fields(kind) if each.default is not ABSENT and each.name not in given]  # type: ignore[arg-type]
    return kind(**{name: getattr(result, name) for name in needed}, **given)
