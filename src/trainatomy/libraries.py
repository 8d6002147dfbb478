"""The libraries that a training depends on, in the versions that are installed here.  Nothing of them is imported."""

from __future__ import annotations

import platform
from importlib import metadata

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchvision", "trainatomy")


def version_of(name: str) -> str | None:
    """The installed version of a library, or of ``python``; ``None`` where it is not installed."""
    if name == "python":
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Python's version, and that of each of ``LIBRARIES`` that is installed."""
    found = {name: version_of(name) for name in ("python", *LIBRARIES)}
    return {name: version for name, version in found.items() if version is not None}
