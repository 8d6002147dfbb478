"""Tables of docs/doctor.md: from the catalogue of findings and the wording."""

from __future__ import annotations

import re

from concepts.page import page
from trainatomy.catalog.machines import FindingEntry, findings, variables
from trainatomy.doctor.probe import COPIED_BYTES
from trainatomy.errors import UnhealthyMachine
from trainatomy.reporters.doctor_sentences import CONNECTIONS, cost_sentence
from trainatomy.results.machine import SEVERITIES
from trainatomy.units import human_bytes

GROUPS = {
    "links": "Links",
    "power": "Power and heat",
    "memory": "Memory of the GPU",
    "modes": "Modes of the GPU",
    "processes": "Other processes",
    "software": "Software",
    "host": "Host",
    "training": "A running training",
    "death": "A training that died",
}
"""Titles of the groups of findings, in the order of the page."""

NEEDED_BYTES = 4 * COPIED_BYTES


def doctor_page() -> str:
    """Render docs/doctor.md."""
    return page(
        "doctor.md",
        {
            "code": UnhealthyMachine.exit_code,
            "needed": human_bytes(NEEDED_BYTES),
            "connections": "\n".join(f"- `{name}`: {meaning}" for name, meaning in _connections()),
            "findings": "\n\n".join(_group(name, title) for name, title in GROUPS.items()),
            "variables": _variables(),
        },
    )


def _connections() -> list[tuple[str, str]]:
    return [("NV#" if name == "NV" else name, meaning) for name, meaning in CONNECTIONS.items()]


def _group(name: str, title: str) -> str:
    entries = [entry for entry in findings().values() if entry.group == name]
    rows = [_row(entry) for entry in sorted(entries, key=lambda entry: SEVERITIES.index(entry.severity))]
    return "\n".join([f"### {title}\n", *rows])


def _row(entry: FindingEntry) -> str:
    found = re.sub(r"\{(\w+)\}", r"*\1*", entry.found)
    severity = "by value" if entry.name == "environment" else entry.severity
    costs = "".join(f"; **{cost_sentence(cost)}**" for cost in entry.costs)
    return f"- `{entry.name}` ({severity}): {found}{costs}"


def _variables() -> str:
    return ", ".join(dict.fromkeys(f"`{variable.name}`" for variable in variables()))
