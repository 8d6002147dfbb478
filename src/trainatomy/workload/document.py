"""YAML (and so JSON) documents as plain values, with the line of every key.

Suggestions for misspelt names.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trainatomy.errors import WorkloadError
from trainatomy.workload.section import Path, Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return up to ``limit`` of the ``known`` names that are spelt like ``name``; case and hyphens do not count."""
    folded = {_fold(each): each for each in reversed(list(known))}
    return [folded[match] for match in get_close_matches(_fold(name), folded, n=limit, cutoff=0.6)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest names, all if they are few, or nothing."""
    names = list(known)
    if close := nearest(name, names):
        return f"; did you mean {_either(close)}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def refuse_unknown(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise ``WorkloadError`` for a value of an option that is none of those it takes."""
    for value in given:
        if value not in known:
            hint = suggestion(value, known) or f"; known: {', '.join(known)}"
            raise WorkloadError(f"{option}: unknown value {value!r}{hint}")


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _fold(name: str) -> str:
    return name.casefold().replace("-", "_")


_MAX_DEPTH = 40
_MAX_NODES = 100_000


@dataclass(frozen=True)
class Document:
    """A parsed file. ``lines`` maps the path of every key and list item to its line (from 1)."""

    source: str
    value: Any
    lines: dict[Path, int]

    def line(self, path: Path) -> int:
        """Return the line of ``path``, or of the nearest enclosing key in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def places(self, row: Path = ()) -> dict[Path, str]:
        """Return where keys of the file, or of one row and above the rows, are written: ``file.yaml:7: train.fp16``."""
        keys = {path: line for path, line in self.lines.items() if path and path[0] != (row or (None,))[0]}
        keys |= {path[len(row) :]: line for path, line in self.lines.items() if row and path[: len(row)] == row != path}
        return {path: f"{self.source}:{line}: {'.'.join(map(str, path))}" for path, line in keys.items()}

    def error(self, path: Path, message: str) -> str:
        """Return one line of an error message: ``file.yaml:7: train.fp16: message``."""
        return f"{self.source}:{self.line(path)}: {Problem(path, message)}"


def parse(text: str, source: str) -> Document:
    """Parse one YAML document.

    Raises:
        WorkloadError: Gives line and column of invalid YAML, of duplicate keys and of keys that are not words.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise WorkloadError(f"{source}: the file is empty; a workload names at least a model")
        walk = _Walk(source)
        walk.visit(node, ())
        if walk.problems:
            raise WorkloadError("\n".join(walk.problems))
        return Document(source, loader.construct_document(node), walk.lines)
    except yaml.MarkedYAMLError as error:
        raise WorkloadError(_malformed(error, text, source)) from None
    except yaml.YAMLError as error:
        raise WorkloadError(f"{source}: is not valid YAML text: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise WorkloadError(f"{source}: is nested too deeply to be a workload") from None
    except ValueError as error:  # SafeLoader on a date such as 2024-13-45
        raise WorkloadError(f"{source}: holds a value that YAML cannot read: {error}") from None


class _Walk:
    """Collector of the lines of keys, and of problems that YAML accepts and a workload does not."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self.problems: list[str] = []
        self.visited = 0

    def visit(self, node: Node, path: Path) -> None:
        """Record the line of ``node`` and of everything in it."""
        self.visited += 1
        if len(path) > _MAX_DEPTH or self.visited > _MAX_NODES:
            raise WorkloadError(f"{self.source}:{_line(node)}: is nested too deeply to be a workload")
        self.lines.setdefault(path, _line(node))
        if isinstance(node, SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index))
        elif isinstance(node, MappingNode):
            self._visit_mapping(node, path)

    def _visit_mapping(self, node: MappingNode, path: Path) -> None:
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = _line(key)
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                found = repr(key.value) if isinstance(key, ScalarNode) else "a list or mapping"
                if len(path) < 2:  # deeper mappings (a model's own configuration) may have numbers as keys
                    self.problems.append(f"{self.source}:{line}: a key must be a word, found {found}")
                    continue
            name = str(key.value)
            if name in seen:
                where = ".".join(map(str, (*path, name)))
                self.problems.append(f"{self.source}:{line}: {where}: is given twice (first in line {seen[name]})")
            seen.setdefault(name, line)
            self.lines[*path, name] = line
            self.visit(value, (*path, name))


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _malformed(error: yaml.MarkedYAMLError, text: str, source: str) -> str:
    """Return line, column and YAML's message, with the offending line and a mark under the place."""
    mark, said = error.problem_mark or error.context_mark, error.problem or "malformed"
    lines = text.splitlines()
    began = error.context_mark
    if "'\\t'" in said:
        said = "a tab; YAML is indented with spaces"
    elif "single document" in str(error.context):
        said = "a second document begins; a workload file holds one"
    elif began is not None and mark is not None and mark.line >= len(lines):
        mark, said = began, f"{error.context}, which begins here and does not end"
    elif began is not None and mark is not None and began.line != mark.line:
        said = f"{said} ({error.context} that begins in line {began.line + 1})"
    if mark is None:
        return f"{source}: malformed YAML: {said}"
    offending = lines[mark.line] if mark.line < len(lines) else ""
    shown = f"\n    {offending.expandtabs(1)}\n    {' ' * mark.column}^" if offending.strip() else ""
    return f"{source}:{mark.line + 1}:{mark.column + 1}: malformed YAML: {said}{shown}"
