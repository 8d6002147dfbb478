"""Commands of installed packages (``trl``, ``llamafactory-cli``), and modules, found without importing anything."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from trainatomy.errors import WorkloadError

_MOST_OF_A_FILE = 512
"""Bytes of a file that name what runs it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a command of a package starts.

    Attributes:
        path: Its file, which scripts find in ``sys.argv``.
        module: The module that it imports; "" if the file is run as a script.
        function: The function that it calls, perhaps of a class.
    """

    path: str
    module: str = ""
    function: str = ""


def installed_command(name: str) -> Entry | None:
    """Return what a command starts that is installed beside this Python, or on the PATH; None if there is none.

    Raises:
        WorkloadError: It is no command of this Python.
    """
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    path = beside or shutil.which(name)
    if path is None and os.path.dirname(name):  # noqa: PTH120
        return None
    for point in metadata.entry_points(group="console_scripts", name=Path(name).name):
        return Entry(path or name, point.module, point.attr)
    if path is None:
        return None
    interpreter = _interpreter(Path(path))
    if interpreter is None:
        raise WorkloadError(
            f"{name} ({path}) is no Python script: give the Python command that it starts to `trainatomy run`"
        )
    if not _is_this_python(interpreter):
        raise WorkloadError(
            f"{name} ({path}) belongs to another Python, {interpreter}: install trainatomy there, and start it by "
            f"`{interpreter} -m trainatomy run {name} …`"
        )
    return Entry(path)


def _interpreter(path: Path) -> str | None:
    """Return the Python that a file's first lines name; None if that is no Python."""
    with path.open("rb") as file:
        lines = file.read(_MOST_OF_A_FILE).decode("utf-8", "replace").splitlines()
    if not lines or not lines[0].startswith("#!"):
        return None
    words = shlex.split(lines[0][2:])
    if words[:1] == ["/bin/sh"] and lines[1:2] and lines[1].startswith("'''exec'"):  # pip writes it for a long path
        words = shlex.split(lines[1].removeprefix("'''exec'"))
    elif words and Path(words[0]).name == "env":
        words = [found for word in words[1:2] if (found := shutil.which(word))]
    return words[0] if words and is_python(words[0]) else None


def is_python(word: str) -> bool:
    """Return whether a word names Python: ``python3.12``, ``/venv/bin/python``."""
    name = Path(word).name
    return name.rstrip("0123456789.") == "python"


def _is_this_python(interpreter: str) -> bool:
    """Return whether a Python has the libraries of this one; those of two environments may be one file."""
    return Path(interpreter).parent.resolve() == Path(sys.executable).parent.resolve()


def module_file(name: str, *, is_main: bool = True) -> Path:
    """Return the file of a module, found without importing its parents.

    Args:
        name: The module.
        is_main: Whether it is run (``-m``): of a package, its ``__main__``.

    Raises:
        WorkloadError: There is none.
    """
    parts, path = name.split("."), None
    spec: ModuleSpec | None = None
    for count in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:count]), path)
        if spec is None:
            owner = ".".join(parts[: count - 1])
            where = f"{owner} has no module {parts[count - 1]}" if owner else f"there is no module {parts[0]}"
            raise WorkloadError(f"-m {name}: {where}")
        path = spec.submodule_search_locations
        if path is None and count < len(parts):
            raise WorkloadError(f"-m {name}: {'.'.join(parts[:count])} is no package")
    if path is not None and is_main:
        spec = _find(f"{name}.__main__", path)
    if spec is None or spec.origin is None:
        raise WorkloadError(f"-m {name}: this is a package without __main__, which cannot be run")
    return Path(spec.origin)


def _find(name: str, path: Any) -> ModuleSpec | None:
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def is_installed(package: str) -> bool:
    """Return whether a top-level package or module is there."""
    return _find(package, None) is not None


def package_folder(module: str) -> str:
    """Return the folder of the package that a module belongs to, or its file."""
    spec = _find(module.partition(".")[0], None)
    if spec is None:
        return ""
    locations = list(spec.submodule_search_locations or ())
    return str(locations[0] if locations else spec.origin or "")
