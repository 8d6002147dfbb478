"""Commands by what they are: Python, a launcher of trainings, a question about the machine, or something else.

Commands of installed packages (``trl``, ``llamafactory-cli``), and modules, found without importing anything.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import WorkloadError

NOTHING = "true"
"""A program that does nothing, successfully."""
SHELL = "/bin/sh"
FILTERS = frozenset({"awk", "cut", "grep", "head", "sed", "sort", "tail", "tr", "uniq", "wc"})
"""Programs that may run behind a pipe, on what another one prints."""
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""Options of Python with a value of its own."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_BETWEEN = re.compile(r"\|\||&&|[;|\n]|(?<![>&])&(?!>)")
"""Between two commands of a line of a shell."""
_HARMLESS = re.compile(r"\d?>\s*/dev/null|2>&1")
_COMPLEX = re.compile(r"[<>`$(){}]")
"""Parts of a line that may write a file, or run something that the words do not show."""


def programs() -> tuple[str, ...]:
    """Return the names of the programs that may be executed in a dry run."""
    compilers = [f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    elsewhere = read_yaml("programs.yaml")["elsewhere"]
    return (NOTHING, SHELL, *sorted(FILTERS | _questions().keys()), *elsewhere, *compilers)


@dataclass(frozen=True, slots=True)
class Words:
    """One command: its words from the program on, and the variables that are set before it."""

    words: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def program(self) -> str:
        """Name of the program without its folder."""
        return Path(self.words[0]).name if self.words else ""


@cache
def _questions() -> dict[str, tuple[tuple[str, ...], ...] | None]:
    """Return the arguments with which a program only asks, by its name; None: with any."""
    known: dict[str, Any] = {}
    for row in read_yaml("programs.yaml")["questions"]:
        only = row.get("only")
        known.update(dict.fromkeys(row["names"], None if only is None else tuple(tuple(one.split()) for one in only)))
    return known


def commands_of(line: str) -> list[Words] | None:
    """Return the commands of a line of a shell in order; None if its words do not show all that it does."""
    plain = _HARMLESS.sub(" ", line)
    if _COMPLEX.search(plain):
        return None
    try:
        return [command_of(words) for part in _BETWEEN.split(plain) if (words := shlex.split(part, comments=True))]
    except ValueError:
        return None


def command_of(words: Sequence[str]) -> Words:
    """Return a command without what only surrounds it: ``A=1 nohup nice -n 5 python x.py`` runs ``python x.py``."""
    rest, variables = list(words), {}
    while rest and (given := _ASSIGNMENT.fullmatch(rest[0])):
        variables[given[1]] = given[2]
        rest = rest[1:]
    if rest and Path(rest[0]).name in read_yaml("programs.yaml")["wrappers"]:
        for position in range(1, len(rest)):
            inner = Words(tuple(rest[position:]), {})
            if is_python(inner) or launched(inner) is not None:
                before = [given for word in rest[1:position] if (given := _ASSIGNMENT.fullmatch(word))]
                return Words(inner.words, {**variables, **{one[1]: one[2] for one in before}})
    return Words(tuple(rest), variables)


def is_question(command: Words) -> bool:
    """Return whether a command only reads."""
    questions = _questions()
    if command.program not in questions:
        return False
    only = questions[command.program]
    arguments = command.words[1:]
    if command.program == "git":
        arguments = _after_options_of_git(arguments)
    return only is None or any(_begins(arguments, words) for words in only)


def _begins(arguments: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether arguments begin with these words; no words: whether there are none; ``+`` is a prefix."""
    if not words or not arguments:
        return not words and not arguments
    if words[0] in ("+", "-"):
        return arguments[0].startswith(words[0])
    return tuple(arguments[: len(words)]) == tuple(words)


def _after_options_of_git(arguments: tuple[str, ...]) -> tuple[str, ...]:
    while arguments and arguments[0].startswith("-") and arguments[0] != "--version":
        arguments = arguments[2 if arguments[0] in ("-C", "-c") else 1 :]
    return arguments


def is_python(command: Words) -> bool:
    """Return whether a command runs Python."""
    return _PYTHON.fullmatch(command.program) is not None


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """What a Python runs: code, a module or a file (``target``), and the words from there on."""

    kind: str
    target: str
    words: tuple[str, ...]


def python_command(command: Words) -> PythonCommand:
    """Return what a command of Python runs; ``kind`` is ``-c``, ``-m``, ``file``, or empty where it is nothing."""
    rest = command.words[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-":
        option = rest[0]
        if option[:2] in ("-c", "-m"):
            target = option[2:] or (rest[1] if len(rest) > 1 else "")
            return PythonCommand(option[:2], target, (option[:2], target, *rest[1 if option[2:] else 2 :]))
        rest = rest[2 if option in _WITH_VALUE else 1 :]
    return PythonCommand("file", rest[0], rest) if rest and rest[0] != "-" else PythonCommand("", "", rest)


def launched(command: Words) -> tuple[str, ...] | None:
    """Return a launcher's command as ``trainatomy run`` reads it (``torchrun …``); None if it is no launcher."""
    words = command.words
    if not words:
        return None
    if is_python(command):
        called = python_command(command)
        if called.kind == "file":
            words = (Path(called.target).name, *called.words[1:])  # /venv/bin/torchrun
        else:
            words = called.words[1:] if called.kind == "-m" else ()
    else:
        words = (command.program, *words[1:])
    for name, instead in read_yaml("programs.yaml")["launchers"].items():
        if _begins(words, name.split()):
            return (*instead.split(), *words[len(name.split()) :])
    return None


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
    return words[0] if words and names_python(words[0]) else None


def names_python(word: str) -> bool:
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
    try:
        return next((spec for spec in found if spec is not None), None)
    except KeyError:  # a folder without __init__.py, for which importlib wants its package to be imported
        spec = ModuleSpec(name, None, is_package=True)
        folders = (Path(folder, name.rpartition(".")[2]) for folder in path)
        spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
        return spec


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
