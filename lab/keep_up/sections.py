"""The page that says what newer releases change: sections of Markdown."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

MISSING = "missing"
"""State of a name that a release does not have (surface.py)."""
MOST_TESTS = 5
"""Tests shown that fail for the same reason."""
MOST_PLACES = 40
"""Places shown at which trainings allocate other bytes."""

Surface = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page; ``needs_work``: something in it is to be read or mended."""

    title: str
    text: str
    needs_work: bool


class Change(NamedTuple):
    """Other allocations at a place of a training: how many more, and bytes more."""

    phase: str
    module: str
    operation: str
    allocations: int
    bytes: int


def whole(sections: Sequence[Section]) -> str:
    """Return the page."""
    return "# What the newest releases change\n\n" + "\n".join(f"## {part.title}\n\n{part.text}" for part in sections)


def summary(sections: Sequence[Section]) -> str:
    """Return a line for each section."""
    return "\n".join(f"{'read' if part.needs_work else 'same':5} {part.title}" for part in sections)


def releases(old: Surface, new: Surface) -> Section:
    names = [*new["releases"], *new["pins"]]
    before = {**old["releases"], **old["pins"]}
    rows = [(name, before.get(name, "none"), {**new["releases"], **new["pins"]}[name]) for name in names]
    return Section("Releases", _table(("library", "pinned", "newest"), rows), False)


def tests(report: Path, paths: Sequence[str] = ()) -> Section:
    """Return the tests that failed, by the first line of their error; ``paths`` are those that ran, or none for all."""
    if not report.exists():
        return Section("Tests: pytest ended without a report", "Run them by hand: `python -m pytest`.\n", True)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    causes: defaultdict[str, list[str]] = defaultdict(list)
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error")):
            cause = (problem.get("message") or "").strip().splitlines()
            causes[cause[0][:200] if cause else "no message"].append(f"{case.get('classname')}::{case.get('name')}")
    failed = sum(map(len, causes.values()))
    lines = [
        f"- {cause}\n" + "".join(f"  - `{name}`\n" for name in names[:MOST_TESTS]) + _more(names, MOST_TESTS, "  ")
        for cause, names in sorted(causes.items(), key=lambda item: -len(item[1]))
    ]
    part = f"Only a part of the tests ran: {', '.join(f'`{path}`' for path in paths)}.\n\n" if paths else ""
    return Section(f"Tests: {failed} of {len(cases)} fail", part + ("".join(lines) or "None.\n"), failed > 0)


def predictions(
    different: Mapping[str, Sequence[str]], allocated: Mapping[str, Sequence[Change]], number: int
) -> Section:
    """Return the predictions that differ, a line each, and where other bytes are allocated, in how many of them."""
    lines = [
        f"- **{name}**: {figures[0]}" + (f"; {len(figures) - 1} more" if figures[1:] else "") + "\n"
        for name, figures in sorted(different.items(), key=lambda item: (not item[1][0].startswith("memory."), item[0]))
    ]
    places: defaultdict[tuple[str, str, str], dict[str, Change]] = defaultdict(dict)
    for name, found in sorted(allocated.items()):
        for change in found:
            module = re.sub(r"\b\d+\b", "*", change.module) or "no module"
            places[change.phase, change.operation, module].setdefault(name, change)  # of one layer
    most = sorted(places.items(), key=lambda item: -len(item[1]))
    where = [
        f"- in {len(names)}: {phase}, `{operation}` in `{module}` "
        f"({change.bytes:+,} bytes and {change.allocations:+} allocations in {name})\n"
        for (phase, operation, module), names in most[:MOST_PLACES]
        for name, change in [max(names.items(), key=lambda item: abs(item[1].bytes))]
    ]
    if where:
        lines += ["\nOther bytes are allocated, in so many predictions:\n\n", *where, _more(most, MOST_PLACES)]
    if lines:
        lines.append(
            "\nAll lines of one: `python lab/same/same.py --only NAME`, with the Python of the new environment.\n"
        )
    title = f"Predictions: {len(different)} of {number} differ"
    return Section(title, "".join(lines) or "None.\n", bool(different))


def changes(old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]]) -> list[Change]:
    """Return where allocations differ, most bytes first; rows are phase, module, operation, number and bytes."""
    number: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()
    for sign, rows in ((-1, old), (1, new)):
        for phase, module, operation, allocations, size_of_all in rows:
            number[phase, module, operation] += sign * allocations
            size[phase, module, operation] += sign * size_of_all
    found = [Change(*place, number[place], size[place]) for place in size if number[place] or size[place]]
    return sorted(found, key=lambda change: -abs(change.bytes))


def settings(old: Surface, new: Surface) -> Section:
    """Return the fields of classes of settings that came, went, or have another default, with their classes."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for name, fields in new["settings"].items():
        before = old["settings"].get(name, {})
        came, gone, changed = _difference(before, fields)
        said = [f"`{field}` is new, by default {fields[field]}" for field in came]
        said += [f"`{field}` is gone" for field in gone]
        said += [f"`{field}`: {before[field]} -> {fields[field]}" for field in changed]
        for line in said:
            owners[line].append(name)
    lines = [f"- {line} ({', '.join(names)})\n" for line, names in owners.items()]
    return Section("Settings", "".join(lines) or "The same.\n", bool(lines))


def operators(old: Surface, new: Surface) -> Section:
    """Return operators with other schemas, kernels written in Python, and environment variables."""
    came, gone, changed = _difference(old["operators"], new["operators"])
    lists = {
        "new operators": came,
        "operators that are gone": gone,
        "operators with another schema": changed,
        "new kernels in Python, which may replace ATen's": sorted(
            {*new["python_overrides"]} - {*old["python_overrides"]}
        ),
        "new environment variables": sorted({*new["environment"]} - {*old["environment"]}),
        "environment variables that are gone": sorted({*old["environment"]} - {*new["environment"]}),
    }
    lines = [f"- {title}: {', '.join(f'`{name}`' for name in names)}\n" for title, names in lists.items() if names]
    return Section("Operators and environment of PyTorch", "".join(lines) or "The same.\n", bool(lines))


def names(old: Surface, new: Surface, reason_of: Callable[[str], str | None]) -> Section:
    """Return the code that the package uses below the public interface, or replaces, and that changed."""
    known = {name: state for name, state in old["names"].items() if state != MISSING}  # the pinned build is for CPUs
    _, _, changed = _difference(known, new["names"])
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name in changed:
        is_gone = " is gone" if new["names"][name] == MISSING else ""
        by_reason[reason_of(name) or "no reason"].append(f"  - `{name}`{is_gone}\n")
    lines = [f"- {reason}\n{''.join(lines)}" for reason, lines in by_reason.items()]
    title = f"Code that is used or replaced: {len(changed)} of {len(known)} changed"
    return Section(title, "".join(lines) or "The same.\n", bool(lines))


def files(old: Surface, new: Surface) -> Section:
    """Return the Python files and headers in the packages that the source names and that changed."""
    _, gone, changed = _difference(old["files"], new["files"])
    lines = [f"- `{name}`\n" for name in changed] + [f"- `{name}` is gone\n" for name in gone]
    return Section("Python files and headers to read", "".join(lines) or "The same.\n", bool(lines))


def upstream_files(changed: Mapping[str, str], named: Mapping[str, Sequence[str]], tags: Sequence[str]) -> Section:
    """Return the files of PyTorch's repository that changed, with the files here that name them."""
    rows = []
    for path, state in sorted(changed.items()):
        users = sorted({user for name, those in named.items() if f"/{path}".endswith(f"/{name}") for user in those})
        rows.append((f"[{path}](https://github.com/pytorch/pytorch/blob/{tags[1]}/{path})", state, ", ".join(users)))
    text = _table(("file", "", "named in"), rows) if rows else "The same.\n"
    return Section(f"Source files of PyTorch to read, {tags[0]} to {tags[1]}: {len(rows)}", text, bool(rows))


def not_compared(tags: Sequence[str], reason: str) -> Section:
    """Return what to do where the two tags of PyTorch's repository could not be compared."""
    old, new = tags
    text = (
        f"Not compared: {reason}\n\n"
        "Run this part again where GitHub can be reached, or with a clone of PyTorch, of which no file is needed:\n\n"
        "```console\n"
        "$ git clone --bare --filter=blob:none https://github.com/pytorch/pytorch pytorch.git\n"
        '$ make keep-up RELEASES="torch=='
        + new.removeprefix("v")
        + ' --without tests predictions --pytorch pytorch.git"\n'
        "```\n"
    )
    return Section(f"Source files of PyTorch to read, {old} to {new}: not compared", text, True)


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return the keys that are new, that are gone, and that have another value."""
    came = sorted({*new} - {*old})
    gone = sorted({*old} - {*new})
    return came, gone, sorted(key for key in {*old} & {*new} if old[key] != new[key])


def _more(items: Sequence[Any], shown: int, indent: str = "") -> str:
    return f"{indent}- and {len(items) - shown} more\n" if len(items) > shown else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"
