"""Which framework a configuration is of, by its keys or by the words of its command; and reading it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path as FilePath
from typing import Any

import yaml

from trainatomy.errors import NotSimulated, WorkloadError
from trainatomy.workload.dialects.translation import (
    DIALECTS,
    Dialect,
    Origin,
    Translation,
    dialect,
    find_file,
    flattened,
    visible_gpus,
)
from trainatomy.workload.document import Document, parse
from trainatomy.workload.launch import read_launch
from trainatomy.workload.overrides import RawWorkload
from trainatomy.workload.section import Path, Problem
from trainatomy.workload.shell import LAUNCHERS, commands_in

_OF_A_WORKLOAD = frozenset({"model", "train", "data", "rows", "gpu", "loop", "trl", "parallel", "generation", "mode"})
_FILES = (".yaml", ".yml", ".json")


def dialect_of(content: Mapping[str, Any]) -> Dialect | None:
    """Return whose configuration a mapping is, None for a workload.

    It is of the dialect most of whose own keys it has; of several such, of the one that knows most of its keys.
    """
    if "rows" in content:
        return None
    nests = not isinstance(content.get("model", ""), str)
    shares = {name: _share(content, dialect(name)) for name in DIALECTS if dialect(name).flat or not nests}
    best = max(shares, key=lambda name: shares[name])
    return dialect(best) if shares[best][0] else None


def _share(content: Mapping[str, Any], table: Dialect) -> tuple[int, int]:
    """Return how many of its own keys of a dialect a mapping has, and how many that the dialect knows."""
    keys = {*content, *flattened(content)} if table.flat else {*content}
    return len(table.marks & keys), len(table.known() & keys)


def read_configuration(document: Document, table: Dialect, folder: FilePath | None, text: str) -> RawWorkload:
    """Return the workload that a configuration file says.

    Args:
        document: The file.
        table: The keys of its framework.
        folder: Its folder, from which paths in it start; None where no files are read.
        text: Its text.

    Raises:
        WorkloadError: One line for each key that is unknown or not simulated, with its line.
    """
    content = document.value
    if mixed := sorted(_OF_A_WORKLOAD.intersection(content) - table.known()):
        raise WorkloadError(
            document.error(
                (mixed[0],),
                f"is a key of a workload, and the file is a configuration of {table.name}: it is one or the other",
            )
        )

    def place(key: str) -> str:
        return f"{document.source}:{document.line(_path(key, table))}: {key}"

    given = flattened(content) if table.flat else content
    return _read(table, given, _Source(document.source, text, folder), place)


def _path(key: str, table: Dialect) -> Path:
    """Return where a key of a dialect is in a file."""
    return tuple(key.split(".")) if table.flat else (key,)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a configuration is from: its file or command, its text, the folder that its paths start from.

    ``settings`` are keys of a workload that are said beside it, ``variables`` those of the shell, and ``counts``
    numbers of GPUs and machines that take their place.
    """

    name: str
    text: str
    folder: FilePath | None
    is_command: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_launched: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)


def _read(table: Dialect, given: Mapping[str, Any], source: _Source, place: Callable[[str], str]) -> RawWorkload:
    said = Translation(table, given, source.folder, source.variables)
    said.counts = source.counts
    always = {} if source.is_launched else table.always
    for path, value in {**always, **source.settings, **source.counts}.items():
        said.set(path, value)
    import_module(f"{__package__}.{table.id}").translate(said)
    said.finish()
    if said.problems:
        kind = WorkloadError if said.is_mistaken else NotSimulated
        raise kind("\n".join(f"{place(key)}: {reason}" for key, reason in said.problems))
    keys = said.keys
    several = {} if source.is_launched else table.several_gpus
    given_counts = source.counts
    assumed = tuple(said.assumed)
    origin = Origin(table.id, source.name, source.is_command, source.text, keys, assumed, several, given_counts)

    def describe(path: Path, message: str) -> str:
        """Name the key of the configuration that set a key of the workload."""
        for length in range(len(path), 0, -1):
            if path[:length] in keys:
                return f"{place(keys[path[:length]])}: {message}"
        return f"{source.name}: {Problem(path, message)}"

    def again(counts: Mapping[str, Any]) -> RawWorkload:
        """Translate for other numbers of GPUs and machines, on which a table may let other settings depend."""
        return _read(table, given, replace(source, counts=counts), place)

    places = {path: place(key) for path, key in keys.items()}
    return RawWorkload(said.mapping, places, describe=describe, origin=origin, again=again if table.flat else None)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a framework.

    Attributes:
        table: The keys of the framework.
        name: The command, as its table has it.
        words: Its options and files.
        launcher: The words of the launcher that starts it; empty without one.
        variables: Variables that are set before it.
    """

    table: Dialect
    name: str
    words: Sequence[str]
    launcher: Sequence[str]
    variables: Mapping[str, str]

    def settings(self, folder: FilePath) -> dict[str, Any]:
        """Return what the command, its launcher and the variables say, as keys of a workload.

        Raises:
            WorkloadError: The command is not simulated, the launcher is not, or a number of GPUs is not set.
        """
        own = self.table.commands[self.name]
        if isinstance(own, str):
            raise NotSimulated(f"not simulated: {own}")
        launcher, settings = self.launcher, dict(own)
        if "--" in self.words:  # `axolotl train FILE --launcher torchrun -- --nproc_per_node 4`
            end = self.words.index("--")
            named = ["torchrun"] if "torchrun" in self.words[:end] else ["accelerate", "launch"]
            launcher = [*named, *self.words[end + 1 :]]
        if launcher:
            words = [str(find_file(word, folder) or word) if word.endswith(_FILES) else word for word in launcher]
            launch = read_launch(shlex.join([*words, "train.py"])).settings(settings.get("loop", "trainer"))
            settings |= {".".join(map(str, path)): value for path, value in launch.items()}
        elif self.table.takes_all_gpus and (visible := visible_gpus(self.variables)) > 1:
            settings["parallel.gpus"] = visible
        return settings | _of_variables(self.variables)


def command_in(text: str) -> Command | None:
    """Return the first command of a framework in a text: a line of the shell, or a script of it."""
    for all_words, variables in commands_in(text):
        launcher, words = _launched(all_words)
        for table in map(dialect, DIALECTS):
            for name in sorted(table.commands, key=len, reverse=True):
                if rest := _after(name.split(), words):
                    return Command(table, name, rest[1:], launcher, variables)
    return None


def _after(start: list[str], words: list[str]) -> list[str]:
    """Return the last word of a command and those after it, where words begin with it; else nothing."""
    head = words[: len(start)]
    is_same = head[1:] == start[1:] and bool(head) and f"/{head[0]}".endswith(f"/{start[0]}")
    return words[len(start) - 1 :] if is_same else []


def _launched(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of torchrun, accelerate launch or deepspeed, and those of what it launches."""
    if not words or FilePath(words[0]).name not in LAUNCHERS:
        return [], words
    module = "torch.distributed.run"
    if words[1:3] == ["-m", module]:
        words = ["torchrun", *words[3:]]
    for index, word in enumerate(words[1:], start=1):
        if word in ("-m", "--module") or word.endswith(".py"):
            inner = words[index:] if word.endswith(".py") else words[index + 1 :]
            is_launcher = not FilePath(words[0]).name.startswith("python")
            return (words[:index] if is_launcher else []), inner
    return [], words


_COUNTS = {"parallel.gpus": "NPROC_PER_NODE", "parallel.nodes": "NNODES"}


def _of_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what variables before a command say of processes, machines and the allocator."""
    settings: dict[str, Any] = {}
    for path, name in _COUNTS.items():
        text = variables.get(name)
        if text is not None and not text.isdigit():
            raise WorkloadError(f"{name}: is {text!r}, which the script does not set: write a number")
        if text is not None:
            settings[path] = int(text)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if name in variables:
            settings["allocator"] = variables[name]
    return settings


def usual_commands() -> list[str]:
    """Return the first command of each framework, as a hint."""
    return [next(iter(dialect(name).commands)) for name in DIALECTS]


def read_command(text: str, folder: FilePath, name: str | None = None) -> RawWorkload:
    """Return the workload that a command of a framework says, with the configuration file that it names.

    Args:
        text: The command, or a script of the shell that holds it.
        folder: The folder of the script, or the current one: its paths start from either, or from one above.
        name: Name of the script, for messages.

    Raises:
        WorkloadError: The text holds no command of a known framework, or an option is unknown or not simulated.
    """
    command = command_in(text)
    if command is None:
        known = ", ".join(f"`{command}`" for command in usual_commands())
        raise WorkloadError(f"{name or text}: holds none of the commands that are read, such as {known}")
    shown = name or command.name
    try:
        settings = command.settings(folder)
    except WorkloadError as error:
        raise type(error)(f"{shown}{f': {command.name}' if name else ''}: {error}") from None
    words = command.words[: command.words.index("--")] if "--" in command.words else command.words
    given, files = _options(words, folder, shown)
    options = frozenset(given)
    for file in files:
        given = {**(flattened(file.value) if command.table.flat else file.value), **given}

    def place(key: str) -> str:
        for file in files:
            path = _path(key, command.table)
            if path in file.lines and key not in options:
                return f"{file.source}:{file.line(path)}: {key}"
        return f"{shown}: --{key}"

    source = _Source(
        name or text,
        text,
        folder,
        is_command=True,
        settings=settings,
        is_launched=bool(command.launcher),
        variables=command.variables,
    )
    return _read(command.table, given, source, place)


def read_again(origin: Origin, text: str) -> RawWorkload:
    """Return the workload that a changed configuration says."""
    if origin.is_command:
        raw = read_command(text, FilePath.cwd(), origin.source)
    else:
        table = dialect(origin.dialect)
        raw = read_configuration(parse(text, origin.source), table, FilePath(origin.source).parent, text)
    return raw if raw.again is None or not origin.counts else raw.again(origin.counts)


def _options(words: Sequence[str], folder: FilePath, source: str) -> tuple[dict[str, Any], list[Document]]:
    """Return the options of a command by name, and the configuration files among its words.

    Options are ``--key value``, ``--key=value``, ``--switch``, or ``key=value``; values are read as YAML reads them.
    """
    given: dict[str, Any] = {}
    files: list[Document] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
            while not equals and waiting and not waiting[0].startswith("--"):
                values.append(waiting.pop(0))
            if key == "config":
                files.append(_configuration(values[0] if values else "", folder))
            else:
                parsed = [_value(each) for each in values]
                given[key.replace("-", "_")] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        elif word.endswith(_FILES):
            files.append(_configuration(word, folder))
        elif "=" in word:
            key, _, value = word.partition("=")
            given[key] = _value(value)
        elif word not in ("train", "launcher", "-c") and word.strip():
            raise WorkloadError(f"{source}: {word!r} is neither an option nor a configuration file")
    return given, files


def _configuration(name: str, folder: FilePath) -> Document:
    path = find_file(name, folder) or FilePath(name)
    try:
        document = parse(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(document.value, Mapping):
        raise WorkloadError(document.error((), "a configuration is a mapping of keys to values"))
    return document


def _value(text: str) -> Any:
    """Return a value as YAML reads it; ``1e-4`` is a number, as for ``float``."""
    try:
        return float(text) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text) else yaml.safe_load(text)
    except yaml.YAMLError:
        return text
