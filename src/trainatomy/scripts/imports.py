"""Call functions as soon as modules have been imported, whoever imports them.

A framework imports its libraries when it likes: a command's main function, a plugin, a lazy module of transformers.

Replace functions wherever modules hold them.

What has to be imported before the simulated GPU appears, and which of the user's files a script imports.

Decide whether a script is simulated compiled, before the simulated GPU appears.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from trainatomy.errors import TrainatomyError
from trainatomy.scripts.job import Job
from trainatomy.scripts.notebook import source_of

Surroundings = Callable[[], contextlib.AbstractContextManager[Any]]


class ImportHook(MetaPathFinder):
    """A finder that finds nothing itself, and watches the loaders that the others find.

    Args:
        apart: Top-level packages that are imported in ``surroundings``.
        surroundings: Returns a context.
        around: Returns the context in which a top-level package is imported, by its name.
    """

    def __init__(
        self,
        apart: Collection[str] = (),
        surroundings: Surroundings = contextlib.nullcontext,
        around: Callable[[str], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._apart, self._surroundings, self._around = frozenset(apart), surroundings, around
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
        around = self._around if "." not in name and name not in sys.stdlib_module_names else None
        if (name not in self._watched and not is_apart and around is None) or name in finding:
            return None
        finding.append(name)  # a finder may ask all finders again
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((one for one in specs if one is not None), None)
        finally:
            finding.remove(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            contexts = [self._surroundings] if is_apart else []
            contexts += [partial(around, name)] if around is not None else []
            spec.loader = _WatchedLoader(spec.loader, contexts, self._executed)
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

    def __init__(self, loader: Any, contexts: Sequence[Surroundings], executed: Callable[[str], None]) -> None:
        self._loader, self._contexts, self._executed = loader, contexts, executed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            self._loader.exec_module(module)
        self._executed(module.__name__)

    def __getattr__(self, name: str) -> Any:  # resources, source text
        return getattr(self._loader, name)


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


_OF_TORCH = ("torch._dynamo", "torch.utils.cpp_extension", "torch.utils.data", "torch.optim.swa_utils")
"""Modules of PyTorch that keep tables of its functions, or look for CUDA's compiler, while they are imported.

Libraries need no such care: their stand-ins are put in place when they are imported (``imports``).
"""
_TALKATIVE = (
    "bitsandbytes", "torch._dynamo", "torch.distributed.elastic", "torch.utils._pytree", "torch.utils.cpp_extension",
    "torchao",
)  # fmt: skip
"""Loggers that warn of a GPU's libraries that are not here."""
_MOST_FILES = 200


def files_of(script: Path, *, package: Path | None = None) -> list[Path]:
    """Return a script and the modules beside it, or in ``package``, that it imports, directly or not."""
    found = [script]
    for file in found:  # grows
        for name in _imported(file) if len(found) < _MOST_FILES else ():
            for folder in {script.parent, *([package] if package else [])}:
                found += [local for local in _local_files(folder, name) if local not in found]
    return found


def _imported(file: Path) -> list[str]:
    """Return the dotted names that a file imports anywhere; [] where it cannot be parsed."""
    try:
        tree = ast.parse(source_of(file))
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _local_files(folder: Path, name: str) -> list[Path]:
    base = folder.joinpath(*name.split("."))
    return [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]


def preload() -> None:
    """Import what keeps PyTorch's own functions."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in _OF_TORCH:
            with contextlib.suppress(ImportError):
                import_module(module)


_NAMED = re.compile(r"(?<!\bre)\.compile\b|torch_?compile|dynamo", re.IGNORECASE)
"""Names of the compiler in a script or a command: ``torch.compile``, ``torch_compile=True``, ``--dynamo_backend``."""
_DISABLED = "TORCHDYNAMO_DISABLE"


def compiling(job: Job, file: Path) -> tuple[Job, str]:
    """Import the compiler where a job wants it, and return the job with ``compiles`` decided.

    Returns:
        The job, and the reason why it is simulated eagerly where the script may compile; "" without one.

    Raises:
        TrainatomyError: It was asked for, and cannot be simulated here.
    """
    wanted = names_compiler(job, file) if job.compiles is None else job.compiles
    if not wanted:
        reason = "" if job.compiles is None else "--no-compile: torch.compile was left out, as asked"
        return replace(job, compiles=False), reason
    from trainatomy.simulator.compiled import preload_compiler

    try:
        preload_compiler("torch.compile")
    except TrainatomyError as error:
        if job.compiles:
            raise
        return replace(job, compiles=False), str(error).partition("\n")[0]
    os.environ.pop(_DISABLED, None)
    settings: Any = import_module("torch._dynamo.config")
    settings.disable = False
    return replace(job, compiles=True), ""


def names_compiler(job: Job, file: Path) -> bool:
    """Return whether a script's files, its arguments or accelerate's variables name the compiler."""
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        return True
    texts = [*job.command.arguments, *map(source_of, files_of(file))]
    return any(_NAMED.search(text) for text in texts)
