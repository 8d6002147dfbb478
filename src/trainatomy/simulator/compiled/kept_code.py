"""Code that Inductor wrote before, for the same graph and the same GPU: in this process, and in files.

Inductor's own cache of graphs finds it (torch 2.11-2.15, torch/_inductor/codecache.py, ``FxGraphCache``): its key is of
the graph, the inputs, all settings and the system, and conditions on sizes that vary are checked again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from trainatomy.libraries import version_of

FOLDER = "TRAINATOMY_CACHE"
"""Variable that names the folder; empty: no files."""
MOST_FILES = 400
"""Files in the folder, of 0.1 to 1 MB; the oldest are removed."""

_in_process: dict[str, list[bytes]] = {}


@contextlib.contextmanager
def kept_code(gpu: str, load: Callable[[str], Any], *, writes: bool) -> Iterator[None]:
    """Let Inductor take code that it wrote before, in the block.

    Args:
        gpu: All that code depends on of a GPU.
        load: Makes a module of code, whose ``call`` has it as ``source``.
        writes: Whether files may be written; those that are there are read.
    """
    codecache: Any = import_module("torch._inductor.codecache")
    output_code: Any = import_module("torch._inductor.output_code")
    config: Any = import_module("torch._inductor.config")
    folder = _folder()

    def candidates(local: bool, remote: Any, key: str) -> Iterator[tuple[Any, bytes, bool]]:
        for content in _in_process.get(key) or _read(folder, key):
            yield pickle.loads(content), content, True

    def keep(key: str, content: bytes) -> None:
        _in_process.setdefault(key, []).append(content)
        if folder is not None and writes:
            _write(folder, key, content)

    def prepared(graph: Any) -> None:
        graph.source_code = graph.current_callable.source
        prepare(graph)

    def loaded(graph: Any, constants: Any) -> str:
        made = load(graph.source_code)
        graph.current_callable = made.call
        graph.recursively_apply_fns, graph.compiled_fn_runner = made.recursively_apply_fns, made.runner
        return ""

    system = {"hash": hashlib.sha256(f"{gpu}\n{_sources()}".encode()).hexdigest()}
    release = (version_of("torch") or "").encode()
    graphs, prepare = codecache.FxGraphCache, output_code.CompiledFxGraph.prepare_for_serialization
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (graphs, "iterate_over_candidates", staticmethod(candidates)),
            (graphs, "_write_to_local_cache", staticmethod(keep)),
            (output_code.CompiledFxGraph, "prepare_for_serialization", prepared),
            (output_code.CompiledFxGraph, "after_deserialization", loaded),
            (codecache.CacheBase, "get_system", staticmethod(lambda: system)),
            (codecache, "torch_key", lambda: release),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(config.patch(fx_graph_cache=True, fx_graph_remote_cache=False))
        yield


def _folder() -> Path | None:
    """Return the folder of the files; None where the user wants none."""
    named = os.environ.get(FOLDER)
    if named is not None:
        return Path(named) / "inductor" if named else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trainatomy" / "inductor"


def _read(folder: Path | None, key: str) -> list[bytes]:
    """Return what files hold for a key."""
    if folder is None:
        return []
    with contextlib.suppress(OSError):
        return [path.read_bytes() for path in sorted(folder.glob(f"{key}-*"))]
    return []


def _write(folder: Path, key: str, content: bytes) -> None:
    """Write a file, and remove the oldest where there are too many; without effect where that is impossible."""
    path = folder / f"{key}-{hashlib.sha256(content).hexdigest()[:16]}"
    part = path.with_name(f".{path.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
        oldest = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in oldest[: len(oldest) - MOST_FILES]:
            file.unlink()


@cache
def _sources() -> str:
    """Return a hash of the files beside this one: what answers for the GPU decides about the code of a graph."""
    return hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    ).hexdigest()
