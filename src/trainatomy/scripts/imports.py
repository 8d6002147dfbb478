"""Call functions as soon as modules have been imported, whoever imports them.

A framework imports its libraries when it likes: a command's main function, a plugin, a lazy module of transformers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Surroundings = Callable[[], contextlib.AbstractContextManager[Any]]


class ImportHook(MetaPathFinder):
    """A finder that finds nothing itself, and watches the loaders that the others find.

    Args:
        apart: Top-level packages that are imported in ``surroundings``.
        surroundings: Returns a context.
    """

    def __init__(self, apart: Collection[str] = (), surroundings: Surroundings = contextlib.nullcontext) -> None:
        self._apart, self._surroundings = frozenset(apart), surroundings
        self._waiting: defaultdict[str, list[Callable[[], Any]]] = defaultdict(list)
        self._watched: set[str] = set()
        self._lock = threading.RLock()
        self._finding, self._complete = _Finding(), set[str]()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch imports in the block."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            self._waiting.clear()

    def when(self, names: str | Sequence[str], function: Callable[[], Any]) -> None:
        """Call a function once modules are imported, all of them; at once if they are already.

        Ask for each module before its import begins.
        """
        wanted = [names] if isinstance(names, str) else names
        with self._lock:
            self._watched.update(wanted)
            missing = [name for name in wanted if not self._is_imported(name)]
            if missing:
                self._waiting[missing[0]].append(lambda: self.when(missing, function))
                return
        function()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that another finder finds for a module that is watched."""
        is_apart, finding = name in self._apart, self._finding.names
        if (name not in self._watched and not is_apart) or name in finding:
            return None
        finding.append(name)  # a finder may ask all finders again
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((one for one in specs if one is not None), None)
        finally:
            finding.remove(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            surroundings = self._surroundings if is_apart else contextlib.nullcontext
            spec.loader = _WatchedLoader(spec.loader, surroundings, self._executed)
        return spec

    def _executed(self, name: str) -> None:
        """Call what waits for a module, which Python still counts as being imported."""
        with self._lock:
            self._complete.add(name)
            functions = self._waiting.pop(name, [])
        for function in functions:
            function()

    def _is_imported(self, name: str) -> bool:
        module = sys.modules.get(name)
        if module is None:
            return False
        return name in self._complete or not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Finding(threading.local):
    """Modules that a thread is looking for."""

    def __init__(self) -> None:
        self.names: list[str] = []


class _WatchedLoader(Loader):
    """A loader that says when it has executed its module, which knows nothing of it."""

    def __init__(self, loader: Any, surroundings: Surroundings, executed: Callable[[str], None]) -> None:
        self._loader, self._surroundings, self._executed = loader, surroundings, executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with self._surroundings():
            self._loader.exec_module(module)
        self._executed(module.__name__)

    def __getattr__(self, name: str) -> Any:  # resources, source text
        return getattr(self._loader, name)
