"""Predict random CPU trainings, run them really, and compare what they take of the host.

``python lab/host/host_compare.py --count 40 --seed 1 --out FILE.jsonl`` draws, predicts and runs, and
``--report FILE.jsonl`` prints the errors of what was run.  Each training runs in a process of its own, and is predicted
before it runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from host_cases import MIB, Case, draw
from pydantic import TypeAdapter

from trainatomy.api.predicting import predict
from trainatomy.catalog.host import Footprint, libraries_footprint
from trainatomy.libraries import version_of
from trainatomy.prediction.assemble import keep_executed
from trainatomy.prediction.host import host_bill
from trainatomy.prediction.host_facts import HostFacts, facts_of
from trainatomy.results.host import HostBill
from trainatomy.results.prediction import Prediction
from trainatomy.workload.schema import Workload

NOTHING = Footprint(0, 0)
BILL = TypeAdapter(HostBill)


def store(case: Case, folder: Path) -> None:
    """Write random weights of the case's model, in a process that is thrown away."""
    script = (
        "import json, sys, torch, transformers\n"
        "name, config, dtype, folder = json.loads(sys.argv[1])\n"
        "kind = getattr(transformers, name)\n"
        "model = kind(kind.config_class(**config)).to(getattr(torch, dtype))\n"
        "model.config.dtype = dtype\n"
        "model.save_pretrained(folder)\n"
    )
    asked = json.dumps([case.model, case.config, case.stored, str(folder)])
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, asked], check=True, capture_output=True)


def predicted(case: Case, folder: Path) -> HostBill:
    """Return the predicted bill of a case."""
    workload = Workload.from_mapping(case.workload(str(folder)))
    with keep_executed() as executed:
        found = predict(workload, timed=False, layouts=False)
    facts = facts_of(workload, executed[-1].simulation, found.checkpoint, found.restored, case.objects * MIB)
    assert facts is not None
    facts = replace(facts, libraries=libraries_footprint("cpu", lambda name: version_of(name) is not None), pins=False)
    if case.place == "away":
        is_saved = case.saves and found.checkpoint is not None
        weights = found.checkpoint.weights_bytes if is_saved and found.checkpoint else 0
        return host_bill(replace(facts, cuda=(NOTHING, NOTHING), checkpoint=weights))
    return host_bill(_on_cpu(facts, found, executed[-1].analysis.allocated_bytes))


def _on_cpu(facts: HostFacts, found: Prediction, allocated: Sequence[int]) -> HostFacts:
    """Return the facts of a training on the CPU: what would be on the GPU is in host memory, and nothing is copied.

    What the steps free stays with the process: most of it lies in arenas of malloc that are not trimmed.
    """
    workspaces = sum(line.bytes for line in found.memory.lines if "workspace" in line.name)
    sizes = {"training": max(allocated)}
    if found.evaluation is not None:
        sizes["evaluation"] = found.evaluation.own_allocated_bytes or 0
        sizes["training"] = found.evaluation.allocated_before_bytes
    if found.checkpoint is not None:
        sizes["saving"] = found.checkpoint.own_allocated_bytes or 0
    tensors: Any = {phase: max(size, sizes["training"]) - workspaces for phase, size in sizes.items()}
    return replace(facts, cuda=None, use=replace(facts.use, gathered=0), saved=0, tensors=tensors)


def measured(case: Case, folder: Path, out: Path) -> HostBill:
    """Run a case and return what it took."""
    here = Path(__file__).parent
    command: list[Any] = [sys.executable, "-W", "ignore", here / "host_child.py", json.dumps(asdict(case)), folder, out]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}\n{done.stderr[-3000:]}")
    return BILL.validate_python(
        {key: value for key, value in json.loads(done.stdout.splitlines()[-1]).items() if key in ("phases", "notes")}
    )


def figures(bill: HostBill) -> dict[str, dict[str, int]]:
    """Return what is compared: of each phase, and of the whole training (``run``), in bytes."""
    found: dict[str, dict[str, int]] = {
        phase.name: {
            "process": phase.fullest.resident_bytes,
            "needed": phase.needed_bytes,
            "held": phase.held_bytes,
            "shm": phase.shm_bytes,
            "disk": phase.disk_bytes,
        }
        for phase in bill.phases
    }
    names = ("process", "needed", "held", "shm", "disk")
    return {**found, "run": {name: max(each[name] for each in found.values()) for name in names}}


def run(count: int, seed: int, out: Path, places: Sequence[str]) -> None:
    """Predict and run cases in these places, one line of JSON each."""
    for number, case in enumerate(case for case in draw(count, seed) if case.place in places):
        with tempfile.TemporaryDirectory(prefix="host-") as folder:
            weights = Path(folder) / "weights"
            store(case, weights)
            before = figures(predicted(case, weights))
            after = figures(measured(case, weights, Path(folder) / "out"))
        with out.open("a") as file:
            file.write(json.dumps({"case": asdict(case), "seed": seed, "predicted": before, "measured": after}) + "\n")
        one, other = (each["run"] for each in (before, after))
        gaps = "  ".join(f"{name} {one[name] / other[name] - 1:+.1%}" for name in ("process", "needed", "held"))
        print(f"{number:3} {case.place:5} {case.model:30} {other['process'] / MIB:7,.0f} MiB  {gaps}", flush=True)


def report(files: Sequence[Path]) -> None:
    """Print the errors of each figure: median, worst and bias, for both places and each phase."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for place in ("cpu", "away"):
        these = [row for row in rows if row["case"]["place"] == place]
        print(f"{place}: {len(these)} trainings")
        for phase in ("run", "libraries", "loading", "training", "evaluation", "saving"):
            for name in ("process", "needed", "held"):
                gaps = [
                    row["predicted"][phase][name] / row["measured"][phase][name] - 1
                    for row in these
                    if phase in row["predicted"] and row["measured"].get(phase, {}).get(name)
                ]
                if gaps:
                    sizes = sorted(map(abs, gaps))
                    print(
                        f"  {phase:11} {name:8} n {len(gaps):3}  median {median(sizes):6.1%}  worst {sizes[-1]:6.1%}"
                        f"  bias {median(gaps):+6.1%}"
                    )


def main() -> None:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--place", action="append", choices=("cpu", "away"), help="only trainings there; repeatable")
    parser.add_argument("--out", type=Path, default=Path("host.jsonl"))
    parser.add_argument("--report", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.report:
        report(asked.report)
    else:
        run(asked.count, asked.seed, asked.out, asked.place or ("cpu", "away"))


if __name__ == "__main__":
    main()
