"""Compare measured scripts (``measured.jsonl``) with the predictions stored before, and write lab/pages/scripts.md.

``compare.py LINES`` prints the table of other lines of ``measure.py`` instead.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEASURED = HERE / "measured.jsonl"
PAGE = HERE.parent / "pages" / "scripts.md"
BEGIN, END = "<!-- Written by lab/scripts/compare.py. -->", "<!-- End of what compare.py writes. -->"
KEYS = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}
TITLES = {
    "first": "The first {count}, on which the causes of the errors were looked for afterwards",
    "held out": "{count} held out: the same scripts with other arguments, chosen before the first were compared with "
    "their predictions, and predicted before they were measured",
    "trials": "{count} held out that let cuDNN try its algorithms "
    "(`trials.yaml`), on an H100 and, the last {last}, on an H200, predicted with cuDNN's library before they were "
    "measured",
    "compiled": "{count} that compile their model, on an H100, predicted before they were measured; memory that "
    "PyTorch needs while it compiles is part of what was measured",
    "users": "{count} written as users write scripts (`users.yaml`), on an H200, predicted with cuDNN's library before "
    "they were measured",
    "users 2": "{count} more of these, on an H200: 23 of a second set and the two of the first set that had not been "
    "measured",
    "users 3": "{count} of a third set, on an H200, predicted with cuDNN's library before they were measured",
    "users 4": "{count} of a fourth set, on an H200, predicted with rules for convolutions before they were measured",
    "users 5": "{count} of a fifth set, on an H200, predicted with rules for convolutions before they were measured",
}


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the lines of scripts that were measured to the end and predicted."""
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return [
        line for line in lines if line.get("measured", {}).get("steps") and "error" not in (line["predicted"] or {})
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Return a table of both figures, with the median and the worst error."""
    text = ["| script | allocated, measured | predicted | | reserved, measured | predicted | |", "| --- " * 7 + "|"]
    errors: dict[str, list[float]] = {key: [] for key in KEYS}
    for line in found:
        cells = [line["name"]]
        for key in KEYS:
            measured, predicted = line["measured"][key], line["predicted"][key]
            errors[key].append(predicted / measured - 1)
            error = "exact" if measured == predicted else f"{errors[key][-1]:+.2%}"
            cells += [f"{measured / 2**20:,.0f} MiB", f"{predicted / 2**20:,.0f} MiB", error]
        text.append(f"| {' | '.join(cells)} |")
    text.append("")
    for key, name in KEYS.items():
        sizes = [abs(one) for one in errors[key]]
        exact = sum(size == 0 for size in sizes)
        text.append(
            f"- {name}: median {statistics.median(sizes):.2%}, worst {max(sizes):.1%}, second worst "
            f"{sorted(sizes)[-2]:.1%}; {exact} of {len(sizes)} to the byte"
        )
    return "\n".join(text)


def section(found: list[dict[str, Any]]) -> str:
    """Return the tables of both sets."""
    parts = []
    for name, title in TITLES.items():
        some = [line for line in found if line["set"] == name]
        last = sum(line["measured"]["gpu"] == "NVIDIA H200" for line in some)
        parts.append(f"{title.format(count=len(some), last=last)}:\n\n{table(some)}")
        if name == "trials":
            parts[-1] += f"\n- in the range over the fastest algorithms: {within(some)}"
    return "\n\n".join(parts)


def within(found: list[dict[str, Any]]) -> str:
    """Return how often the peaks are in the predicted range, where there is one."""
    parts = []
    for key, name in KEYS.items():
        ranges = [(line["measured"][key], line["predicted"].get("plans"), line["predicted"][key]) for line in found]
        ends = [(one, plans[key.removeprefix("peak_")] if plans else (only, only)) for one, plans, only in ranges]
        parts.append(f"{name} {sum(low <= one <= high for one, (low, high) in ends)} of {len(ends)}")
    return ", ".join(parts)


def write_page(text: str) -> str:
    """Return the page with the tables in their place."""
    begin, rest = text.split(BEGIN)
    return f"{begin}{BEGIN}\n\n{section(rows(MEASURED))}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(table(rows(Path(sys.argv[1]))))
    else:
        PAGE.write_text(write_page(PAGE.read_text()))
