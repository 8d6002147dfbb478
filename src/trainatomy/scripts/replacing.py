"""Replace functions wherever modules hold them, and let libraries be changed when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OURS = __name__.partition(".")[0]


def replace_everywhere(stack: ExitStack, replacements: Iterable[tuple[Any, Any]]) -> None:
    """Replace objects in all modules but ours until ``stack`` closes: ``from os import remove`` keeps a function, too.

    Args:
        stack: Puts the originals back.
        replacements: Originals, and what takes their places.
    """
    originals = {id(original): (original, new) for original, new in replacements}
    changed: list[tuple[ModuleType, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == _OURS:
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in originals:
                original, new = originals[id(value)]
                changed.append((module, attribute, original))
                setattr(module, attribute, new)

    def restore() -> None:
        for module, attribute, original in changed:
            setattr(module, attribute, original)

    stack.callback(restore)


class LateImports:
    """A finder of modules that calls a function with each one that was waited for, once it is imported."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[Any], None]]] = {}

    def install(self, stack: ExitStack) -> None:
        """Watch imports until ``stack`` closes."""
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        stack.callback(sys.meta_path.remove, self)  # type: ignore[arg-type]

    def wait(self, name: str, then: Callable[[Any], None]) -> None:
        """Call ``then`` with a module: at once if it is there already, else when it is imported."""
        module = sys.modules.get(name)
        if module is not None:
            then(module)
        else:
            self._waiting.setdefault(name, []).append(then)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls the functions that wait."""
        if name not in self._waiting:
            return None
        waiting = self._waiting.pop(name)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for then in waiting:
                then(module)

        loader.exec_module = exec_module
        return spec
