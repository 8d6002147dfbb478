"""Compare measured scripts (the lines that ``measure.py`` wrote) with the predictions stored before, as Markdown."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

KEYS = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}


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
            cells += [f"{measured / 2**20:,.0f} MiB", f"{predicted / 2**20:,.0f} MiB", f"{errors[key][-1]:+.1%}"]
        text.append(f"| {' | '.join(cells)} |")
    for key, name in KEYS.items():
        sizes = [abs(one) for one in errors[key]]
        text.append(f"\n{name}: median {statistics.median(sizes):.2%}, worst {max(sizes):.1%} of {len(sizes)} scripts")
    return "\n".join(text)


if __name__ == "__main__":
    print(table(rows(Path(sys.argv[1]))))
