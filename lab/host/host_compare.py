"""Predict random trainings, run them really, and compare what they take of the host.

``python lab/host/host_compare.py --count 40 --seed 1 --out FILE.jsonl`` draws, predicts and runs on the CPU, and
``--report FILE.jsonl`` prints the errors of what was run.  Each training runs in a process of its own, and is predicted
before it runs.  On a machine with GPUs, ``--gpus 1`` or ``--gpus 2`` draws trainings on so many; ``--jobs`` runs some
side by side, each with a /dev/shm of its own, and after ``--seconds`` none begins any more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from host_cases import MIB, Case, draw
from pydantic import TypeAdapter

from trainatomy.api.predicting import predict
from trainatomy.catalog.host import CudaFootprint, Footprint, libraries_footprint
from trainatomy.libraries import version_of
from trainatomy.prediction.assemble import keep_executed
from trainatomy.prediction.host import host_bill
from trainatomy.prediction.host_facts import HostFacts, facts_of
from trainatomy.results.host import HOST_PHASES, HostBill, HostPart, HostPhase, HostProcess
from trainatomy.results.prediction import Prediction
from trainatomy.workload.schema import Workload

NOTHING = Footprint(0, 0)
BILL = TypeAdapter(HostBill)
LIMIT_SECONDS = 120
"""Longest that a training may take, with the start of its processes."""
FRESH_SHM = (
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "sh",
    "-c",
    'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
    "sh",
)
"""Begins a command that has a /dev/shm of its own; needs to be root."""


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


def predicted(case: Case, folder: Path, gpu: str = "h200") -> HostBill:
    """Return the predicted bill of a case, on this GPU if it is one of GPUs."""
    workload = Workload.from_mapping(case.workload(str(folder)))
    if case.place == "cuda":
        dataset = case.objects * MIB or None
        bill = predict(workload, gpu=gpu, timed=False, layouts=False, dataset_memory=dataset).host_bill
        assert bill is not None
        return bill
    with keep_executed() as executed:
        found = predict(workload, timed=False, layouts=False)
    facts = facts_of(workload, executed[-1].simulation, found.checkpoint, found.restored, case.objects * MIB)
    assert facts is not None
    facts = replace(facts, libraries=libraries_footprint("cpu", lambda name: version_of(name) is not None), pins=False)
    if case.place == "away":
        is_saved = case.saves and found.checkpoint is not None
        weights = found.checkpoint.weights_bytes if is_saved and found.checkpoint else 0
        return host_bill(replace(facts, cuda=CudaFootprint(NOTHING, NOTHING, NOTHING), checkpoint=weights))
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


def measured(case: Case, folder: Path, out: Path, *, apart: bool) -> HostBill:
    """Run a case and return what it took; ``apart``: with a /dev/shm of its own."""
    bills = out.with_name("bills")
    bills.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.gpus}"] if case.gpus > 1 else []
    child = str(Path(__file__).with_name("host_child.py"))
    command = [
        sys.executable,
        "-W",
        "ignore",
        *launcher,
        child,
        json.dumps(asdict(case)),
        str(folder),
        str(out),
        str(bills),
    ]
    command = [*FRESH_SHM, *command] if apart else command
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-3000:]}")
    return _together([json.loads(file.read_text()) for file in sorted(bills.iterdir())])


def _together(ranks: Sequence[dict[str, Any]]) -> HostBill:
    """Return the bill of a host from those of its ranks and from the memory of their launcher."""
    found = [BILL.validate_python({"phases": rank["phases"]}) for rank in ranks]
    launcher = next((rank["launcher"] for rank in ranks if rank["launcher"]), None)
    others: tuple[HostProcess, ...] = ()
    if launcher is not None:
        anonymous, mapped, *_ = launcher
        others = (HostProcess("other", (HostPart("", "anonymous", anonymous), HostPart("", "mapped", mapped))),)
    phases = []
    for name in HOST_PHASES:
        if same := [phase for bill in found for phase in bill.phases if phase.name == name]:
            processes = [process for phase in same for process in phase.processes]
            shm, disk = (
                max(sizes) for sizes in zip(*((each.shm_bytes, each.disk_bytes) for each in same), strict=True)
            )
            phases.append(HostPhase(name, (*processes, *others), shm, disk))
    return HostBill(tuple(phases))


def figures(bill: HostBill) -> dict[str, dict[str, int]]:
    """Return what is compared: of each phase, and of the whole training (``run``), in bytes."""
    found: dict[str, dict[str, int]] = {
        phase.name: {
            "process": phase.fullest.resident_bytes,
            "needed": phase.needed_bytes,
            "held": phase.held_bytes,
            "shm": phase.shm_bytes,
            "disk": phase.disk_bytes,
            "pinned": sum(process.count * process.of_kind("pinned") for process in phase.processes),
        }
        for phase in bill.phases
    }
    names = ("process", "needed", "held", "shm", "disk", "pinned")
    return {**found, "run": {name: max(each[name] for each in found.values()) for name in names}}


def compared(case: Case, seed: int, gpu: str, *, apart: bool) -> dict[str, Any]:
    """Predict and run a case."""
    with tempfile.TemporaryDirectory(prefix="host-") as folder:
        weights = Path(folder) / "weights"
        store(case, weights)
        before = predicted(case, weights, gpu)
        began = time.monotonic()
        after = measured(case, weights, Path(folder) / "out", apart=apart)
    return {
        "case": asdict(case),
        "seed": seed,
        "predicted": figures(before),
        "measured": figures(after),
        "bills": {"predicted": asdict(before)["phases"], "measured": asdict(after)["phases"]},
        "seconds": time.monotonic() - began,
    }


def run(cases: Sequence[Case], seed: int, out: Path, gpu: str, jobs: int, seconds: float) -> None:
    """Predict and run cases, so many side by side, one line of JSON each; none begins after so many seconds."""
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running: dict[Any, int] = {}
        waiting = list(enumerate(cases))
        while waiting or running:
            while waiting and len(running) < jobs and time.monotonic() - began < seconds:
                number, case = waiting.pop(0)
                running[pool.submit(compared, case, seed, gpu, apart=jobs > 1)] = number
            if not running:
                print(f"{len(waiting)} trainings were not begun in {seconds:.0f} s", flush=True)
                return
            done = next(as_completed(running))
            _tell(running.pop(done), done, out)


def _tell(number: int, done: Any, out: Path) -> None:
    """Print and write what a case gave."""
    try:
        row = done.result()
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(f"{number:3} failed: {error} {getattr(error, 'stderr', '')}", flush=True)
        return
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    case, one, other = row["case"], row["predicted"]["run"], row["measured"]["run"]
    gaps = "  ".join(f"{name} {one[name] / other[name] - 1:+.1%}" for name in ("process", "needed", "held"))
    place = f"{case['place']} {case['offload']}".rstrip()
    size = f"{other['process'] / MIB:7,.0f} MiB"
    pinned = f"  pinned {one['pinned'] / MIB:,.0f} of {other['pinned'] / MIB:,.0f} MiB" if other["pinned"] else ""
    print(f"{number:3} {place:16} {case['model']:30} {size}  {gaps}{pinned}  {row['seconds']:.0f} s", flush=True)


def report(files: Sequence[Path]) -> None:
    """Print the errors of each figure: median, worst and bias, for both places and each phase."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for place in ("cpu", "away", "cuda"):
        these = [row for row in rows if row["case"]["place"] == place]
        print(f"{place}: {len(these)} trainings")
        for phase in ("run", "libraries", "loading", "training", "evaluation", "saving"):
            for name in ("process", "needed", "held", "pinned"):
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
    parser.add_argument("--gpus", type=int, default=0, help="draw trainings on so many GPUs instead")
    parser.add_argument("--gpu", default="h200", help="which GPU this machine has")
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after so many")
    parser.add_argument("--out", type=Path, default=Path("host.jsonl"))
    parser.add_argument("--report", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.report:
        report(asked.report)
        return
    cases = [case for case in draw(asked.count, asked.seed, asked.gpus) if not asked.place or case.place in asked.place]
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // asked.jobs, 1)))
    run(cases, asked.seed, asked.out, asked.gpu, asked.jobs, asked.seconds)


if __name__ == "__main__":
    main()
