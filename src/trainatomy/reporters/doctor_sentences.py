"""Sentences of the doctor's findings, from their wording (``catalog/machine_data/findings.yaml``) and what was found.

Bytes, rates and shares are formatted by the ending of the value's name (``_bytes``, ``rate``, ``share``).
"""

from __future__ import annotations

from trainatomy.catalog.machines import findings
from trainatomy.results.machine import Cost, Diagnosis, Finding
from trainatomy.units import human_bytes, many, percent

CONNECTIONS = {
    "NV": "bonded NVLinks, the fastest way: fit for FSDP and tensor parallelism",
    "PIX": "one PCIe bridge: as fast as PCIe, peer to peer",
    "PXB": "several PCIe bridges, without the host: nearly as fast as PCIe",
    "PHB": "PCIe through the host's processor: fit for DDP",
    "NODE": "between PCIe bridges of one processor: slower, fit for DDP",
    "SYS": "across the link between processors: the slowest; keep such GPUs in separate training runs",
}
"""Meaning of the connections of ``nvidia-smi topo -m`` for a training."""

UNMEASURED = {
    "unwanted": "Copies were not measured (--no-bandwidth): PCIe and clocks are those of the moment.",
    "busy": "Copies were not measured, because a GPU is in use: PCIe and clocks are those of the moment.",
    "watching": "Copies were not measured, because a training was watched.",
    "failed": "Copies could not be measured: CUDA did not start, or the measurement failed.",
}
"""Reasons for which copies were not measured."""

COSTS = {
    "training": "a training takes {longer}",
    "all_reduce": "an all-reduce takes {longer}",
    "slower": "{percent} % less throughput",
    "launches": "launches take up to {longer}",
}
"""Subject of each measured cost."""

_SEVERAL = 200
"""Per cent from which on a cost is told as a multiple."""

_UNKNOWN = "?"


def found_sentence(finding: Finding) -> str:
    """Return what was found."""
    return _filled(findings()[finding.name].found, finding)


def meaning_sentence(finding: Finding) -> str:
    """Return what a finding means for a training."""
    return _filled(findings()[finding.name].means, finding)


def fix_sentence(finding: Finding) -> str:
    """Return the command that fixes it, or what to do; empty where nothing is to be done."""
    return _filled(findings()[finding.name].fix, finding)


def cost_sentence(cost: Cost) -> str:
    """Return a measured cost with its case: ``a training takes 29 % longer (GPT-2 with DDP on ...)``."""
    longer = (
        f"{1 + cost.percent / 100:.0f} times as long" if cost.percent >= _SEVERAL else f"{cost.percent:.0f} % longer"
    )
    return f"{COSTS[cost.what].format(longer=longer, percent=f'{cost.percent:.0f}')} ({cost.where})"


def place(finding: Finding) -> str:
    """Return where a finding is: ``GPU 0``, ``GPUs 0, 1``, or empty for the whole machine."""
    if not finding.gpus:
        return ""
    return ("GPU " if len(finding.gpus) == 1 else "GPUs ") + ", ".join(map(str, finding.gpus))


def verdict(diagnosis: Diagnosis) -> str:
    """Return how many findings there are."""
    counts = {name: diagnosis.count(name) for name in ("error", "warning", "note")}
    known = [many(count, name) for name, count in counts.items() if count]
    return ", ".join(known) if known else "nothing wrong was found"


class _Values(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return _UNKNOWN


def _filled(template: str, finding: Finding) -> str:
    values = _Values({name: _formatted(name, value) for name, value in finding.values.items()})
    values.setdefault("gpu", ",".join(map(str, finding.gpus)))
    return template.format_map(values)


def _formatted(name: str, value: str | int | float) -> str:
    """Return a value of a finding; its unit follows from the end of its name."""
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return human_bytes(int(value))
    if name.endswith("rate"):
        return f"{value / 1e9:.1f} GB/s"
    if name.endswith(("share", "utilisation")):
        return percent(value, 1, 0)
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"
