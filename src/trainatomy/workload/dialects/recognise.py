"""Which framework a configuration is of, by its keys or by the words of its command; and reading it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import yaml

from trainatomy.errors import NotSimulated, WorkloadError
from trainatomy.workload.dialects.translation import DIALECTS, Dialect, Origin, Translation, dialect
from trainatomy.workload.document import Document, parse
from trainatomy.workload.launch import read_launch
from trainatomy.workload.overrides import RawWorkload
from trainatomy.workload.section import Path, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

_OF_A_WORKLOAD = frozenset({"model", "train", "data", "rows", "gpu", "loop", "trl", "parallel", "generation", "mode"})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*")


def dialect_of(content: Mapping[str, Any]) -> Dialect | None:
    """Return whose configuration a mapping is, None for a workload: the dialect most of whose own keys it has."""
    if not isinstance(content.get("model", ""), str) or "rows" in content:
        return None
    shares = {name: len(dialect(name).marks.intersection(content)) for name in DIALECTS}
    best = max(shares, key=lambda name: shares[name])
    return dialect(best) if shares[best] else None


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
        return f"{document.source}:{document.line((key,))}: {key}"

    return _read(table, content, _Source(document.source, text, folder), place)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a configuration is from: its file or command, its text, and the folder that its paths start from."""

    name: str
    text: str
    folder: FilePath | None
    is_command: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_launched: bool = False


def _read(table: Dialect, given: Mapping[str, Any], source: _Source, place: Callable[[str], str]) -> RawWorkload:
    said = Translation(table, given, source.folder)
    for path, value in source.settings.items():
        said.set(path, value)
    import_module(f"{__package__}.{table.id}").translate(said)
    said.finish()
    if said.problems:
        kind = WorkloadError if said.is_mistaken else NotSimulated
        raise kind("\n".join(f"{place(key)}: {reason}" for key, reason in said.problems))
    keys = said.keys
    several = {} if source.is_launched else table.several_gpus
    origin = Origin(table.id, source.name, source.is_command, source.text, keys, tuple(said.assumed), several)

    def describe(path: Path, message: str) -> str:
        """Name the key of the configuration that set a key of the workload."""
        for length in range(len(path), 0, -1):
            if path[:length] in keys:
                return f"{place(keys[path[:length]])}: {message}"
        return f"{source.name}: {Problem(path, message)}"

    return RawWorkload(said.mapping, {path: place(key) for path, key in keys.items()}, describe=describe, origin=origin)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a framework.

    Attributes:
        table: The keys of the framework.
        name: The command, as its table has it.
        words: Its options and files.
        launcher: The words of the launcher that starts it; empty without one.
        settings: What variables before it say, as keys of a workload.
    """

    table: Dialect
    name: str
    words: Sequence[str]
    launcher: str
    settings: Mapping[str, Any]


def command_in(text: str) -> Command | None:
    """Return the first command of a framework in a text: a line of the shell, or a script of it."""
    variables: dict[str, str] = {}
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        words = words[1:] if words[:1] == ["export"] else words
        while words and _VARIABLE.fullmatch(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        launcher, words = _launched(words)
        for table in map(dialect, DIALECTS):
            for name in sorted(table.commands, key=len, reverse=True):
                if rest := _after(name.split(), words):
                    return Command(table, name, rest[1:], shlex.join(launcher), _gpus(variables))
    return None


def _after(start: list[str], words: list[str]) -> list[str]:
    """Return the last word of a command and those after it, where words begin with it; else nothing."""
    head = words[: len(start)]
    is_same = head[1:] == start[1:] and bool(head) and f"/{head[0]}".endswith(f"/{start[0]}")
    return words[len(start) - 1 :] if is_same else []


def _launched(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of torchrun, accelerate launch or deepspeed, and those of what it launches."""
    if not words or FilePath(words[0]).name not in ("torchrun", "accelerate", "deepspeed", "python", "python3"):
        return [], words
    for index, word in enumerate(words[1:], start=1):
        if word in ("-m", "--module") or word.endswith(".py"):
            inner = words[index:] if word.endswith(".py") else words[index + 1 :]
            is_launcher = not FilePath(words[0]).name.startswith("python")
            return (words[:index] if is_launcher else []), inner
    return [], words


def _gpus(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return how many GPUs the variables before a command say."""
    count = variables.get("NPROC_PER_NODE", "")
    if not count.isdigit():
        return {}
    nodes = variables.get("NNODES", "1")
    settings = {"parallel.gpus": int(count)} if int(count) > 1 else {}
    return settings | ({"parallel.nodes": int(nodes)} if nodes.isdigit() and int(nodes) > 1 else {})


def usual_commands() -> list[str]:
    """Return the first command of each framework, as a hint."""
    return [next(iter(dialect(name).commands)) for name in DIALECTS]


def read_command(text: str, folder: FilePath, name: str | None = None) -> RawWorkload:
    """Return the workload that a command of a framework says, with the configuration file that it names.

    Args:
        text: The command, or a script of the shell that holds it.
        folder: The folder from which its paths start.
        name: Name of the script, for messages.

    Raises:
        WorkloadError: The text holds no command of a known framework, or an option is unknown or not simulated.
    """
    command = command_in(text)
    if command is None:
        known = ", ".join(f"`{command}`" for command in usual_commands())
        raise WorkloadError(f"{name or text}: holds none of the commands that are read, such as {known}")
    given, files = _options(command.words, folder, name or command.name)
    options = frozenset(given)
    for file in files:
        given = {**dict(file.value), **given}

    def place(key: str) -> str:
        for file in files:
            if (key,) in file.lines and key not in options:
                return f"{file.source}:{file.line((key,))}: {key}"
        return f"{name or command.name}: --{key}"

    settings = {**command.table.commands[command.name], **command.settings}
    if command.launcher:
        launch = read_launch(f"{command.launcher} train.py").settings(settings.get("loop", "trainer"))
        settings |= {".".join(map(str, path)): value for path, value in launch.items()}
    source = _Source(name or text, text, folder, is_command=True, settings=settings, is_launched=bool(command.launcher))
    return _read(command.table, given, source, place)


def read_again(origin: Origin, text: str) -> RawWorkload:
    """Return the workload that a changed configuration says."""
    if origin.is_command:
        return read_command(text, FilePath.cwd(), origin.source)
    table = dialect(origin.dialect)
    return read_configuration(parse(text, origin.source), table, FilePath(origin.source).parent, text)


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
                files.append(_configuration(folder / values[0] if values else folder))
            else:
                parsed = [_value(each) for each in values]
                given[key.replace("-", "_")] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        elif word.endswith((".yaml", ".yml", ".json")):
            files.append(_configuration(folder / word))
        elif "=" in word:
            key, _, value = word.partition("=")
            given[key] = _value(value)
        elif word not in ("train", "launcher"):
            raise WorkloadError(f"{source}: {word!r} is neither an option nor a configuration file")
    return given, files


def _configuration(path: FilePath) -> Document:
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
