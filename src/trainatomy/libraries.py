"""The libraries that a training depends on: the versions installed here, and optional imports."""

from __future__ import annotations

import platform
from functools import cache
from importlib import import_module, metadata
from typing import Any

from trainatomy.errors import MissingLibrary, TrainatomyError

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "trl",
    "sentence-transformers",
    "torchvision",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "trainatomy",
)


@cache  # reads a file of each library, which takes a tenth of a small prediction
def version_of(name: str) -> str | None:
    """Return the installed version of a library, or of ``python``; ``None`` where it is not installed."""
    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Return Python's version, and that of each of ``LIBRARIES`` that is installed."""
    found = {name: version_of(name) for name in ("python", *LIBRARIES)}
    return {name: version for name, version in found.items() if version is not None}


def import_library(name: str, purpose: str, *, install: str | None = None) -> Any:
    """Import a library that ``purpose`` needs; raise ``MissingLibrary`` if it is not installed, or does not work here.

    Args:
        name: The module.
        purpose: What needs it, for the message.
        install: What pip installs, where it is not called like the module.
    """
    try:
        return import_module(name)
    except (TrainatomyError, MemoryError):
        raise
    except Exception as error:  # a package that was built for another release of torch raises anything
        cause = _first_cause(error)
        if isinstance(cause, ModuleNotFoundError) and _package(cause.name or "") == _package(name):
            message = f"{purpose} needs {name}, which is not installed: pip install {install or name}"
        else:
            said = str(cause) if isinstance(cause, ImportError) else f"{type(cause).__name__}: {cause}"
            message = (
                f"{purpose} needs {name}, which is installed but cannot be imported: {said}\n"
                f'Repair the packages until python -c "import {name}" succeeds'
            )
        raise MissingLibrary(message, library=name) from error


def _package(module: str) -> str:
    return module.partition(".")[0]


def _first_cause(error: BaseException) -> BaseException:
    """Return the exception that others were raised for; transformers says of each only that it cannot import."""
    before = error.__cause__
    return error if before is None else _first_cause(before)
