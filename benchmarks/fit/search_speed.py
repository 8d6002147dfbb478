"""Time ``trainatomy fit`` on this machine: ``python benchmarks/fit/search_speed.py [--jobs 2] [--names …]``.

Each search is a command of its own, with its start, its price list and its page. Memory is the sum over its processes,
each page of memory counted once (PSS), and so are the seconds of CPU time, which other work on the machine changes less
than it does the seconds; both are sampled twice a second. Exits with 1 beyond the limits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MEMORY_LIMIT_BYTES = 4 * 2**30
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Search:
    """A search, its GPU, and the seconds that it may take on two cores."""

    name: str
    workload: dict[str, Any]
    gpu: str
    limit_seconds: float = 30.0


def _text(model: str, length: int, train: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": {"id": model, **more}, "data": {"sequence_length": length}, "train": train}


SEARCHES = (
    Search("bert-large", _text("bert-large-uncased", 512, {"fp16": True}), "rtx-4090"),
    Search("gpt2-medium", _text("gpt2-medium", 1024, {"bf16": True}), "rtx-4090"),
    Search("llama-3.2-1b", _text("meta-llama/Llama-3.2-1B", 1024, {}), "a100-40gb"),
    Search("llama-3.2-1b-lora", _text("meta-llama/Llama-3.2-1B", 1024, {}, lora={"r": 16}), "rtx-4090"),
    Search("vit-large", {"model": {"id": "google/vit-large-patch16-224"}, "train": {"bf16": True}}, "rtx-4090"),
    Search("llama-3.1-8b-lora", _text("meta-llama/Llama-3.1-8B", 2048, {}, lora={"r": 16}), "a100-40gb", 60.0),
)


def run(search: Search, jobs: int) -> dict[str, Any]:
    """Return seconds, memory and counts of one search."""
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "workload.yaml", Path(folder) / "fit.json"
        file.write_text(yaml.safe_dump(search.workload), encoding="utf-8")
        command = [sys.executable, "-m", "trainatomy", "fit", str(file), "--gpu", search.gpu, "--json"]
        began, peak, cpu = time.perf_counter(), 0, dict[int, float]()
        with output.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [*command, "--effective-batch-size", "64", "--jobs", str(jobs)], stdout=stream, stderr=subprocess.PIPE
            )
            while process.poll() is None:
                sampled = {pid: _usage(pid) for pid in _descendants(process.pid)}
                peak = max(peak, sum(memory for memory, _ in sampled.values()))
                cpu.update({pid: max(seconds, cpu.get(pid, 0.0)) for pid, (_, seconds) in sampled.items()})
                time.sleep(SAMPLE_SECONDS)
        seconds = time.perf_counter() - began
        assert process.stderr is not None
        if process.returncode:
            raise SystemExit(f"{search.name}: {process.stderr.read().decode()}")
        found = json.loads(output.read_text(encoding="utf-8"))
    counts = found["counts"]
    return {
        "name": search.name,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(cpu.values()), 1),
        "limit_seconds": search.limit_seconds,
        "memory_bytes": peak,
        "candidates": counts["space"],
        "executed": counts["executed"],
        "prices": len(found["prices"]),
        "best": [change["option"] for change in found["best"]["changes"]],
    }


def _descendants(pid: int) -> Iterator[int]:
    """Yield a process and its descendants; the server that forks workers is one of them."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        with suppress(OSError):  # it has ended
            waiting += map(int, Path(f"/proc/{one}/task/{one}/children").read_text(encoding="utf-8").split())
        yield one


def _usage(pid: int) -> tuple[int, float]:
    """Return the PSS of a process in bytes, and the seconds of CPU time that it has taken; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        times = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0), sum(
        int(times[place]) / ticks for place in (11, 12)
    )


def main() -> int:
    """Time the searches; return 1 if one is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--names", help="only these, separated by commas")
    options = parser.parse_args()
    slow = 0
    for search in SEARCHES:
        if options.names is None or search.name in options.names.split(","):
            found = run(search, options.jobs)
            print(json.dumps(found), flush=True)
            slow += found["seconds"] > search.limit_seconds or found["memory_bytes"] > MEMORY_LIMIT_BYTES
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
