"""Machines: measured hosts, and facts behind the findings of ``trainatomy doctor``.

Machines whose CPU cost of launching operations was measured (``hosts.yaml``).

Facts about machines: findings with their costs, environment variables, extensions, drivers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.results.machine import Cost, Severity


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, as far as launching operations depends on it.

    Attributes:
        microseconds: Costs by the field names of ``timing.host_costs.CPUCosts``.
        slowdowns: Slowdown against ``microseconds`` in each measurement session; shared machines are slowed by other
            work.
        source: Origin of the figures.
        probe_seconds: Time of the probe of a host's pace (``measurement.device.host_probe``) while nothing else ran, by
            the probe's name.
        backward_probe_shares: Share of that time on autograd's thread, by the probe's name.
        pace_exponents: Power of the probe's time with which a step's CPU time grows, by the probe's name.
        copy_exponent: Power of the pace with which copies of samples into batches take longer, and copies of batches
            from pageable memory, which the driver's threads on the CPU make.
        recurrent_exponent: Power of the pace with which cuDNN takes longer to launch the kernels of recurrent networks.
    """

    id: str
    name: str
    microseconds: dict[str, Any]
    slowdowns: tuple[float, ...]
    source: str
    probe_seconds: dict[str, float] = field(default_factory=dict)
    pace_exponents: dict[str, float] = field(default_factory=dict)
    backward_probe_shares: dict[str, float] = field(default_factory=dict)
    copy_exponent: float = 0.0
    recurrent_exponent: float = 1.0

    @property
    def quiet(self) -> float:
        """Least slowdown of all sessions: other work only ever slows a machine, and a prediction assumes none."""
        return min(self.slowdowns)


@cache
def hosts() -> dict[str, Host]:
    """Return all machines by id."""
    found = read_yaml("hosts.yaml")["hosts"]
    return {key: _host(key, one) for key, one in found.items()}


def _host(key: str, one: dict[str, Any]) -> Host:
    slowdowns = tuple(float(session["factor"]) for session in one["sessions"])
    probes = {name: float(value) / 1e6 for name, value in one.get("probe_microseconds", {}).items()}
    exponents = {name: float(value) for name, value in one.get("pace_exponents", {}).items()}
    shares = {name: float(value) for name, value in one.get("backward_probe_shares", {}).items()}
    powers = {name: float(one[name]) for name in ("copy_exponent", "recurrent_exponent") if name in one}
    source = one["source"].strip()
    return Host(key, one["name"], one["microseconds"], slowdowns, source, probes, exponents, shares, **powers)


def reference_host() -> Host:
    """Return the machine that others are compared with, assumed where none is named."""
    return hosts()[read_yaml("hosts.yaml")["reference"]]


_FOLDER = "machine_data"


@dataclass(frozen=True, slots=True)
class FindingEntry:
    """A finding.

    Attributes:
        name: Its name.
        severity: How bad it is.
        group: What it is about.
        found: What was found; ``{name}`` stands for a value of the finding, here and below.
        means: What it means for a training.
        fix: What fixes it; empty where nothing is to be done.
        source: Who says so.
        costs: What it was measured to cost.
    """

    name: str
    severity: Severity
    group: str
    found: str
    means: str
    fix: str
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
        name: FindingEntry(name, **{**one, "costs": tuple(Cost(**cost) for cost in one.get("costs", ()))})
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
