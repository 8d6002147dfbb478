"""Facts that depend on the version of torch or transformers, and how far each release was checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of

Version = tuple[int, int]
Checked = Literal["measured", "published", "source", "unverified"]

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def parse_version(text: str) -> Version:
    """Return major and minor number: ``"2.11.0+cu130"`` gives ``(2, 11)``.

    Raises:
        WorkloadError: The text does not begin with two numbers.
    """
    found = _NUMBERS.match(text)
    if found is None:
        raise WorkloadError(f"{text!r} is not a version such as 2.11")
    return int(found[1]), int(found[2])


def version_text(version: Version) -> str:
    """Return ``"2.11"`` for ``(2, 11)``."""
    return ".".join(map(str, version))


def behaviour(name: str, torch_version: Version) -> Any:
    """Return the value of a behaviour (a key of ``versions.yaml``) in a release of torch."""
    return [value for since, value in _history(name) if since <= torch_version][-1]


def first_release_with(name: str, wanted: str) -> Version | None:
    """Return the first release in which a list-valued behaviour contains ``wanted``."""
    return next((since for since, value in _history(name) if wanted in value), None)


def transformers_since(name: str) -> Version:
    """Return the first release of transformers that has something (a key of ``transformers`` in ``versions.yaml``)."""
    return parse_version(read_yaml("versions.yaml")["transformers"][name]["since"])


def transformers_has(name: str) -> bool:
    """Return whether the installed release of transformers has something; a release that is not known has not."""
    installed = version_of("transformers")
    until = read_yaml("versions.yaml")["transformers"][name].get("until")
    if installed is None:
        return False
    version = parse_version(installed)
    return transformers_since(name) <= version and (until is None or version < parse_version(until))


def checked(library: str, version: Version) -> Checked:
    """Return how far the rules of a release were checked; ``unverified`` where the data file does not list it."""
    entry = _releases(library).get(version)
    return entry["checked"] if entry is not None else "unverified"


def oldest_release(library: str) -> Version:
    """Return the oldest release that can be simulated."""
    return min(_releases(library))


@dataclass(frozen=True, slots=True)
class PythonChange:
    """A change of a part of PyTorch that is written in Python, and runs here in the installed release."""

    part: str
    since: Version
    what: str
    source: str


def python_changes(one: Version, other: Version) -> tuple[PythonChange, ...]:
    """Return the known changes between two releases of torch, in either order."""
    first, last = sorted((one, other))
    entries = read_yaml("versions.yaml")["python_parts"]
    changes = (
        PythonChange(part, parse_version(entry["since"]), entry["what"], entry["source"])
        for part, of_part in entries.items()
        for entry in of_part
    )
    return tuple(change for change in changes if first < change.since <= last)


def version_note(library: str, version: Version) -> str | None:
    """Return a note for the reader of a prediction where a release was never checked, else ``None``.

    Raises:
        WorkloadError: The release is older than all whose rules are known.
    """
    oldest = oldest_release(library)
    if version < oldest:
        raise WorkloadError(
            f"{library} {version_text(version)} cannot be simulated: rules are known from "
            f"{library} {version_text(oldest)} on",
            key=f"software.{library}" if library == "torch" else None,
        )
    if checked(library, version) != "unverified":
        return None
    known = [version_text(each) for each in sorted(_releases(library))]
    return (
        f"{library} {version_text(version)} is simulated by the rules of the releases that were checked "
        f"({', '.join(known)}); no prediction for it was verified"
    )


@cache
def _history(name: str) -> tuple[tuple[Version, Any], ...]:
    entries = read_yaml("versions.yaml")["behaviours"][name]["releases"]
    return tuple(sorted((parse_version(entry["since"]), entry["value"]) for entry in entries))


@cache
def _releases(library: str) -> Mapping[Version, Mapping[str, Any]]:
    return {parse_version(text): entry for text, entry in read_yaml("versions.yaml")["releases"][library].items()}
