"""What has to be imported before the simulated GPU appears, and which of the user's files a script imports."""

from __future__ import annotations

import ast
import contextlib
import logging
import warnings
from importlib import import_module
from pathlib import Path

from trainatomy.scripts.notebook import source_of

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
