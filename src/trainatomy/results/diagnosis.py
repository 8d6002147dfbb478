"""Faults of a machine: findings, worst first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainatomy.results.machine import MachineState

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first: training runs fail or are wrong; they are slower or at risk; something to know, often on purpose."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Measured cost of a finding.

    Attributes:
        percent: By how many per cent something takes longer, or less of something is left.
        what: Which figure that is, a key of ``reporters.doctor_sentences.COSTS``.
        where: The case in which it was measured.
        source: Who measured it.
    """

    percent: float
    what: str
    where: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or should be known.

    Attributes:
        name: Which one, a key of ``catalog/machine_data/findings.yaml``.
        severity: How bad it is.
        gpus: The GPUs concerned.
        values: What was found, for the sentences.
        costs: What it was measured to cost elsewhere.
    """

    name: str
    severity: Severity
    gpus: tuple[int, ...] = ()
    values: Mapping[str, str | int | float] = field(default_factory=dict)
    costs: tuple[Cost, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A machine and its findings, worst first."""

    machine: MachineState
    findings: tuple[Finding, ...]

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def healthy(self) -> bool:
        """True if there are only notes, or nothing."""
        return not (self.count("error") or self.count("warning"))
