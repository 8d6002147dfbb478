"""Facts about machines: findings with their costs, environment variables, extensions, drivers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from trainatomy.catalog.files import read_yaml
from trainatomy.results.diagnosis import Cost, Severity

_FOLDER = "machine_data"


@dataclass(frozen=True, slots=True)
class FindingEntry:
    """A finding: how bad it is, what it is about, who says so, and what it was measured to cost."""

    name: str
    severity: Severity
    group: str
    source: str
    costs: tuple[Cost, ...] = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """A value of an environment variable that changes memory or speed.

    Attributes:
        when: A regular expression for the whole value.
        effect: What happens then, as a sentence without its capital.
        costs: What it was measured to cost.
    """

    name: str
    when: str
    severity: Severity
    effect: str
    source: str
    costs: tuple[Cost, ...] = ()


@dataclass(frozen=True, slots=True)
class ExtensionEntry:
    """A library with kernels of its own.

    Attributes:
        package: As pip installs it.
        module: As it is imported.
        models: Families of transformers that are slow without it.
        either: A package that serves instead.
    """

    package: str
    module: str
    models: tuple[str, ...] = ()
    either: str = ""
    source: str = ""


@cache
def findings() -> Mapping[str, FindingEntry]:
    """Return every finding by name."""
    return {
        name: FindingEntry(
            name, one["severity"], one["group"], one["source"], tuple(Cost(**cost) for cost in one.get("costs", ()))
        )
        for name, one in read_yaml(_FOLDER, "findings.yaml")["findings"].items()
    }


@cache
def variables() -> tuple[Variable, ...]:
    """Return the values of environment variables that are known to matter."""
    data = read_yaml(_FOLDER, "environment.yaml")
    return tuple(
        Variable(
            name,
            str(case["when"]),
            case["severity"],
            case["effect"],
            data["sources"][case["source"]],
            findings()[case["costs"]].costs if "costs" in case else (),
        )
        for name, cases in data["variables"].items()
        for case in cases
    )


def variable(name: str, value: str) -> Variable | None:
    """Return what a value of an environment variable does, or ``None`` if nothing is known of it."""
    found = (one for one in variables() if one.name == name and re.fullmatch(one.when, value.strip(), re.IGNORECASE))
    return next(found, None)


@cache
def extensions() -> tuple[ExtensionEntry, ...]:
    """Return the libraries with kernels of their own."""
    return tuple(
        ExtensionEntry(
            one["package"], one["module"], tuple(one.get("for", ())), one.get("either", ""), one.get("source", "")
        )
        for one in read_yaml(_FOLDER, "extensions.yaml")["extensions"]
    )


def minimum_driver(cuda: int) -> int | None:
    """Return the first number of the oldest driver that runs CUDA's major version ``cuda``."""
    found: int | None = read_yaml(_FOLDER, "drivers.yaml")["minimum"].get(cuda)
    return found
