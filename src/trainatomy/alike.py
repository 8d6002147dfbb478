"""Replacements that keep the signature of what they replace.

Libraries look at what they call: Lightning makes a ``DataLoader`` again from the parameters of its ``__init__``, the
Trainer drops the columns that ``forward`` does not name, and anybody may pass an argument by its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def alike(original: Any, replacement: Any, current: Callable[[], Any] | None = None) -> Any:
    """Return a replacement with the signature, names and documentation of the original.

    An argument that is passed by the original's name reaches the replacement's parameter in the same position.

    Args:
        original: A function, class, class method or static method; anything else has nothing to keep.
        replacement: What takes its place.  A class is changed, a function is not.
        current: Returns what to call instead of the replacement; None: the replacement.
    """
    if isinstance(replacement, classmethod | staticmethod):
        function = getattr(original, "__func__", original)
        return type(replacement)(alike(function, replacement.__func__, current))
    if not callable(replacement) or not callable(original):
        return replacement
    signature = _signature(original)
    if inspect.isclass(replacement):
        return _class_alike(original, replacement, signature)
    names = _renamed(signature, _signature(replacement))

    def call(*arguments: Any, **keywords: Any) -> Any:
        function = replacement if current is None else current()
        if names and function is replacement:
            keywords = {names.get(name, name): value for name, value in keywords.items()}
        return function(*arguments, **keywords)

    functools.update_wrapper(call, original)
    if signature is not None:
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _class_alike(original: Any, replacement: Any, signature: inspect.Signature | None) -> Any:
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        if (value := getattr(original, name, None)) is not None:
            setattr(replacement, name, value)
    if signature is not None:
        replacement.__signature__ = signature
    return replacement


def _signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function; None for one that does not say, as many in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _renamed(theirs: inspect.Signature | None, ours: inspect.Signature | None) -> dict[str, str]:
    """Return our names of parameters, by the original's where these differ."""
    if theirs is None or ours is None:
        return {}
    before, after = (
        [one.name for one in signature.parameters.values() if one.kind in _BY_POSITION] for signature in (theirs, ours)
    )
    return {old: new for old, new in zip(before, after, strict=False) if old != new}
