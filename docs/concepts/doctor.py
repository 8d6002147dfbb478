"""Tables of docs/doctor.md: from the catalogue of findings, the wording, and the records of real machines."""

from __future__ import annotations

import json
import re

from concepts.page import ROOT, page, table
from trainatomy.catalog.machine import FindingEntry, findings, variables
from trainatomy.doctor.probe import COPIED_BYTES
from trainatomy.errors import UnhealthyMachine
from trainatomy.reporters.doctor_sentences import CONNECTIONS, cost_sentence
from trainatomy.reporters.doctor_wordings import WORDINGS
from trainatomy.results.diagnosis import SEVERITIES
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
}
"""Titles of the groups of findings, in the order of the page."""

ADVICE = (
    (
        "Power: enough independent cables, a supply that holds its voltage",
        "`power_brake`, `hardware_slowdown`, `power_limit`",
    ),
    ("Cooling: under 80 °C, throttling from about 84 °C", "`hot`, `thermal_slowdown`"),
    ("Which PCIe slot: lanes and generation", "`pcie_narrow`, `pcie_slow`, `pcie_slot`, `slow_copies`"),
    ("Connectivity: `nvidia-smi topo -m`", "the matrix and its legend; `far_gpus`, `pcie_only`, `no_peer_access`"),
    ("NVLink: how many links", "`nvlink_down`, `nvlink_errors`, `fabric_not_ready`"),
    (
        "DataLoader: utilisation far from 100 %",
        "`gpu_waits` (with `--watch-pid`), `trainatomy data`; `shm_small`, `cpu_quota`, `host_busy`",
    ),
    (
        "Prebuilds: apex, the CUDA toolkit, NGC containers",
        "`no_kernels`, `ptx_only`, `extension_broken`, `slow_fallback`, `other_versions`, `driver_too_old`",
    ),
)
"""Advice of the guides (performance on one and several GPUs) and the findings that check it."""

RECORDS = ROOT / "lab" / "records" / "doctor" / "two-h200.jsonl"
NEEDED_BYTES = 4 * COPIED_BYTES


def doctor_page() -> str:
    """Render docs/doctor.md."""
    return page(
        "doctor.md",
        {
            "code": UnhealthyMachine.exit_code,
            "needed": human_bytes(NEEDED_BYTES),
            "advice": table(("advice", "finding"), ADVICE),
            "connections": table(
                ("connection", "meaning"), tuple((f"`{name}`", text) for name, text in _connections())
            ),
            "findings": "\n\n".join(_group(name, title) for name, title in GROUPS.items()),
            "variables": _variables(),
            "tried": _tried(),
        },
    )


def _connections() -> list[tuple[str, str]]:
    return [("NV#" if name == "NV" else name, meaning) for name, meaning in CONNECTIONS.items()]


def _group(name: str, title: str) -> str:
    entries = [entry for entry in findings().values() if entry.group == name]
    rows = [_row(entry) for entry in sorted(entries, key=lambda entry: SEVERITIES.index(entry.severity))]
    return f"### {title}\n\n{table(('finding', 'what was found, and what it means', 'fix', 'sources'), rows)}"


def _row(entry: FindingEntry) -> tuple[str, ...]:
    words = WORDINGS[entry.name]
    found, means, fix = (re.sub(r"\{(\w+)\}", lambda match: f"*{match[1]}*", text) for text in words)
    severity = "by value" if entry.name == "environment" else entry.severity
    sources = "; ".join([entry.source, *(f"**{cost_sentence(cost)}**: {cost.source}" for cost in entry.costs)])
    return tuple(map(_cell, (f"`{entry.name}`: {severity}", f"{found}: {means}", fix, sources)))


def _variables() -> str:
    rows = [(f"`{one.name}`", f"`{_cell(one.when)}`", one.severity, one.effect, one.source) for one in variables()]
    return table(("variable", "value", "", "effect", "source"), rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _tried() -> str:
    """Return the causes that were made on a real GPU, with what was found."""
    if not RECORDS.exists():
        return "Not measured yet."
    lines = [json.loads(line) for line in RECORDS.read_text("utf-8").splitlines()]
    rows = [(line["case"], _names(line["expected"]), _names(list(dict.fromkeys(line["found"])))) for line in lines]
    about = (
        "Causes that need no changed setting were made on a machine with two H200 (driver 580, torch 2.11, "
        "2026-11-22); the finding that each must have was written down before. All of them fired. "
        "Two more were wrong and have been corrected since: `slow_pair`, because NVML's number of the NVLink version "
        "is not the generation, and `nvlink_errors`, which counted CRC errors that healthy links have too; so was "
        "`power_capped` of the training that waits. Links that are down, slowdowns and bad memory have been seen only "
        "in tests with made-up answers of NVML."
    )
    return f"{about}\n\n{table(('cause', 'expected', 'found'), rows)}"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
