"""Predict what scripts take of their host, run them on a GPU, and compare.

``python lab/host/script_compare.py --count 26 --out FILE.jsonl`` predicts scripts of ``lab/scripts/users.yaml``, those
whose names have the least SHA-256, and needs no GPU.  ``--measure --predicted FILE.jsonl --out MEASURED.jsonl`` runs
them on this machine's GPU, and ``--report FILE.jsonl MEASURED.jsonl`` prints the errors.

A script's process, and what all its processes together hold, are read four times a second; the process's largest
resident memory is the kernel's own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from trainatomy.measurement.proc import children, resident, share_of

SCRIPTS = Path(__file__).parents[1] / "scripts"
PERIOD_SECONDS, LIMIT_SECONDS = 0.25, 60
MIB = 2**20
FIGURES = ("process", "needed", "held")
"""The fullest process; memory of all processes that the kernel cannot take back; the same with mapped files."""


def chosen(count: int) -> dict[str, str]:
    """Return the commands of so many scripts by their names."""
    every = yaml.safe_load((SCRIPTS / "users.yaml").read_text(encoding="utf-8"))
    names = sorted(every, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:count]
    return {name: every[name]["run"] for name in names}


def predicted(name: str, command: str) -> dict[str, Any]:
    """Return the figures of a script as predicted, or why there are none."""
    run = (sys.executable, "-m", "trainatomy", "run", "--gpu", "h200", "--torch", "2.11", "--json", *command.split())
    done = subprocess.run(run, cwd=SCRIPTS, capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        return {"name": name, "error": done.stderr.strip()[-300:]}
    bill = json.loads(done.stdout).get("host_bill")
    if bill is None:
        return {"name": name, "error": "no bill of the host"}
    process = max(_of_process(one) for phase in bill["phases"] for one in phase["processes"])
    needed, held = (max(phase[f"{what}_bytes"] for phase in bill["phases"]) for what in ("needed", "held"))
    return {"name": name, "command": command, "process": process, "needed": needed, "held": held}


def _of_process(process: dict[str, Any]) -> int:
    return sum(part["bytes"] for part in process["parts"] if not part["inherited"])


def measured(name: str, command: str) -> dict[str, Any]:
    """Run a script and return what it took."""
    most = dict.fromkeys(FIGURES, 0)
    began = time.monotonic()
    process = subprocess.Popen(
        (sys.executable, *command.split()), cwd=SCRIPTS, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and time.monotonic() - began < LIMIT_SECONDS:
        read = dict.fromkeys(FIGURES, 0)
        for pid in (process.pid, *children(process.pid)):
            own, share = resident(pid), share_of(pid)
            if own is not None and share is not None:
                read["process"] = max(read["process"], own.most)
                read["needed"] += own.anonymous + own.shared - share.others
                read["held"] += share.total
        most = {figure: max(most[figure], read[figure]) for figure in FIGURES}
        time.sleep(PERIOD_SECONDS)
    ended = process.poll()
    process.kill()
    said = process.stderr.read()[-300:] if process.stderr and ended else ""
    return {"name": name, **most, "exit": ended, "error": said, "seconds": time.monotonic() - began}


def compared(predictions: Path, measurements: Path) -> Iterator[str]:
    """Yield a line for each script that was predicted and run, and one for each figure."""
    ours = {line["name"]: line for line in lines(predictions)}
    errors: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for line in lines(measurements):
        mine = ours.get(line["name"], {})
        if line["exit"] not in (0, None) or "process" not in mine:
            yield f"{line['name']:28} {line.get('error') or mine.get('error', '')}"
            continue
        shown = []
        for figure in FIGURES:
            errors[figure].append(mine[figure] / line[figure] - 1)
            shown.append(f"{figure} {line[figure] / MIB:7,.0f} MiB {errors[figure][-1]:+6.1%}")
        yield f"{line['name']:28} {'  '.join(shown)}"
    for figure, found in errors.items():
        sizes = sorted(map(abs, found))
        if sizes:
            yield f"{figure}: {len(sizes)} scripts, median {median(sizes):.1%}, worst {sizes[-1]:.1%}"


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Predict, measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=26)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--predicted", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", nargs=2, type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_args()
    if given.report:
        print(*compared(*given.report), sep="\n")
        return
    began = time.monotonic()
    scripts = chosen(given.count)
    if given.predicted:
        known = {line["name"] for line in lines(given.predicted) if "process" in line}
        scripts = {name: command for name, command in scripts.items() if name in known}
    do = measured if given.measure else predicted

    def one(name: str, command: str) -> dict[str, Any] | None:
        return do(name, command) if time.monotonic() - began < given.seconds else None

    with ThreadPoolExecutor(given.jobs) as pool, given.out.open("a", encoding="utf-8") as out:
        for future in as_completed([pool.submit(one, name, command) for name, command in scripts.items()]):
            if (line := future.result()) is not None:
                print(line["name"], {figure: round(line.get(figure, 0) / MIB) for figure in FIGURES}, line.get("error"))
                out.write(json.dumps(line) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
