"""Ask whether random trainings survive limits near their predicted peaks, and hold the answers against the kernel's.

``python lab/host/host_limits.py --count 30 --seed 1 --out FILE.jsonl`` draws trainings of ``host_cases.py`` whose GPU
is a stand-in, predicts each, and runs it in a control group with a limit: a third below the predicted peak, the others
above it.  The verdict is right if the kernel kills a process where it says ``does not fit``, and none where it says
``fits`` or ``tight``.  ``--report FILE.jsonl`` prints what was right.  Needs to be root where control groups can be
made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from host_cases import MIB, Case, draw
from host_compare import FRESH_SHM, predicted, store

from trainatomy.results.host import HostLimits

LIMIT_SECONDS = 400
BELOW, ABOVE = (0.75, 0.96), (1.04, 1.35)
"""Shares of the predicted peak: limits that are to kill, and limits that are not."""


@dataclass(frozen=True)
class Group:
    """A control group with a limit, of version 2 or 1.

    Attributes:
        folder: Its folder.
        limit: The file that sets the limit of its memory.
        events: The file that counts the processes that were killed for lack of it.
        most: The file with the most memory that it charged.
    """

    folder: Path
    limit: str
    events: str
    most: str

    @property
    def killed(self) -> int:
        """Processes that the kernel killed."""
        words = (self.folder / self.events).read_text().split()
        return next(int(value) for name, value in pairwise(words) if name == "oom_kill")


@contextmanager
def group(limit: int, top: Path = Path("/sys/fs/cgroup")) -> Iterator[Group]:
    """Make a control group with a limit in bytes, for as long as the context."""
    name = f"host-{os.getpid()}"
    if (top / "memory").is_dir():
        files = ("memory.limit_in_bytes", "memory.oom_control", "memory.max_usage_in_bytes")
        found = Group(top / "memory" / name, *files)
    else:
        found = Group(top / name, "memory.max", "memory.events", "memory.peak")
    found.folder.mkdir()
    try:
        (found.folder / found.limit).write_text(str(limit))
        yield found
    finally:
        time.sleep(0.5)  # until the last processes have left it
        found.folder.rmdir()


def limited(case: Case, folder: Path, limit: int) -> dict[str, Any]:
    """Run a case under a limit, and return what became of it."""
    with group(limit) as within:
        child = str(Path(__file__).with_name("host_child.py"))
        (folder / "bills").mkdir()
        paths = [str(folder / name) for name in ("weights", "out", "bills")]
        enter = ["sh", "-c", f'echo $$ > {within.folder}/cgroup.procs && exec "$@"', "sh"]
        command = [*enter, *FRESH_SHM, sys.executable, "-W", "ignore", child, json.dumps(asdict(case)), *paths]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        most = int((within.folder / within.most).read_text())
        if done.returncode and not within.killed:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")
        return {"killed": within.killed, "returncode": done.returncode, "most": most}


def run(count: int, seed: int, out: Path) -> None:
    """Predict and run cases, one line of JSON each."""
    chance = random.Random(seed)
    cases = [case for case in draw(4 * count, seed) if case.place == "away"][:count]
    for number, case in enumerate(cases):
        low, high = BELOW if number % 3 == 0 else ABOVE
        share = chance.uniform(low, high)
        with tempfile.TemporaryDirectory(prefix="host-") as name:
            folder = Path(name)
            store(case, folder / "weights")
            bill = predicted(case, folder / "weights")
            limit = round(share * bill.fullest.needed_bytes)
            verdict = replace(bill, limits=HostLimits(limit, "the control group")).verdict
            found = limited(case, folder, limit)
        row = {"case": asdict(case), "seed": seed, "share": share, "limit": limit, "verdict": verdict, **found}
        row |= {"needed": bill.fullest.needed_bytes, "phase": bill.fullest.name}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(_line(number, row), flush=True)


def _line(number: int, row: dict[str, Any]) -> str:
    fate = "killed" if row["killed"] else "survived"
    mark = "" if is_right(row) else "  WRONG"
    size = f"{row['limit'] / MIB:6,.0f} MiB, {row['share']:.2f} of the predicted peak ({row['phase']})"
    return f"{number:3} {row['case']['model']:30} {size}: {row['verdict']}, {fate}{mark}"


def is_right(row: dict[str, Any]) -> bool:
    """Tell whether the kernel did what the verdict says."""
    return bool(row["killed"]) == (row["verdict"] == "does not fit")


def report(files: list[Path]) -> None:
    """Print every run, and how many verdicts were right."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for number, row in enumerate(rows):
        print(_line(number, row))
    killed = sum(bool(row["killed"]) for row in rows)
    print(f"{sum(map(is_right, rows))} of {len(rows)} right; {killed} were killed")


def main() -> None:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("limits.jsonl"))
    parser.add_argument("--report", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.report:
        report(asked.report)
    else:
        run(asked.count, asked.seed, asked.out)


if __name__ == "__main__":
    main()
