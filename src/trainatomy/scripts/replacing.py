"""Replace functions wherever modules hold them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

_OURS = __name__.partition(".")[0]


def replace_everywhere(stack: ExitStack, replacements: Iterable[tuple[Any, Any]]) -> None:
    """Replace objects in all modules but ours until ``stack`` closes: ``from os import remove`` keeps a function, too.

    Args:
        stack: Puts the originals back.
        replacements: Originals, and what takes their places.
    """
    news = dict(replacements)
    kinds = set(map(type, news))  # others may be unhashable; ``id`` would be slow, as each call is an audit event
    changed: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == _OURS:
            continue
        for attribute, value in list(vars(module).items()):
            if type(value) in kinds and value in news:
                changed.append((module, attribute, value))
                setattr(module, attribute, news[value])

    def restore() -> None:
        for module, attribute, original in changed:
            setattr(module, attribute, original)

    stack.callback(restore)
