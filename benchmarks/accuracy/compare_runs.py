"""Compare two measurements of the same rows: ``python benchmarks/accuracy/compare_runs.py ONE.jsonl OTHER.jsonl``.

Shows how repeatable measurements are, and whether a forked process measures the same as a fresh one
(``measure_grid.py --no-fork``).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

KEYS = ("status", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "context_bytes", "model_bytes")


def read(path: Path) -> dict[str, dict[str, object]]:
    """Read a measured.jsonl file, by row."""
    return {line["name"]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def differences(one: dict[str, dict[str, object]], other: dict[str, dict[str, object]]) -> list[str]:
    """Return a line for each value that differs in a row of both files; unreadable values do not count."""
    return [
        f"{name}: {key} {one[name][key]} / {other[name][key]}"
        for name in one
        if name in other
        for key in KEYS
        if None not in (one[name][key], other[name][key]) and one[name][key] != other[name][key]
    ]


def main() -> int:
    """Print the differences; return 1 where there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2, metavar="MEASURED.jsonl")
    one, other = map(read, parser.parse_args().runs)
    found = differences(one, other)
    print("\n".join([*found, f"{len(one.keys() & other.keys())} rows in both, {len(found)} values differ"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
