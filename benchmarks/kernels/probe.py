"""Record the allocations of every case of ``cases``, on a GPU or in the simulation, and compare them.

python benchmarks/kernels/probe.py gpu --out probes-h200.json.gz          (on a machine with the GPU)
python benchmarks/kernels/probe.py compare probes-h200.json.gz [--group attention] [--show 20]
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
Events = list[tuple[str, int, int]]


def on_gpu(out: Path) -> None:
    """Run every case on the GPU with memory history recorded."""
    from cases import cases

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "cases": {},
        "outside": [],
    }
    for group, make in cases():
        try:
            for name, case in make():
                key = f"{group}: {name}"
                try:
                    found["cases"][key] = _history(case)
                except Exception as error:
                    found["cases"][key] = f"{type(error).__name__}: {str(error)[:200]}"
        except Exception as error:
            found["cases"][group] = f"{type(error).__name__}: {str(error)[:200]}"
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        found["outside"].append([group, total - free - torch.cuda.memory_reserved()])
    with gzip.open(out, "wt") as file:
        json.dump(found, file)
    print(f"{len(found['cases'])} cases in {out}")


def _history(case: Any) -> Events:
    case()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, clear_history=True)
    case()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    events: Events = []
    for entry in trace:
        if entry["action"] == "alloc":
            events.append(("alloc", entry["addr"], entry["size"]))
        elif entry["action"] == "free_completed":
            events.append(("free", entry["addr"], entry["size"]))
    return events


def simulated(capability: tuple[int, int], multiprocessors: int, version: tuple[int, int]) -> dict[str, Any]:
    """Run every case in the simulation."""
    from cases import cases

    from trainatomy.operators.allocation import allocation_rules
    from trainatomy.operators.allocation.plan import Processor
    from trainatomy.operators.allocation.workspaces import WorkspaceTracker
    from trainatomy.simulator.process import SimulatedProcess

    found: dict[str, Any] = {}
    processor = Processor(capability, multiprocessors, version)
    process = SimulatedProcess("probe", 1 << 40, processor, allocation_rules(), WorkspaceTracker(processor))
    with process.open():
        process.recorder.stage = "forward"
        for group, make in cases():
            try:
                for name, case in make():
                    key = f"{group}: {name}"
                    try:
                        case()
                        start = len(process.trace.events)
                        case()
                        found[key] = [
                            (e.action, e.allocation, e.bytes, process.trace.origins[e.allocation].operation)
                            for e in process.trace.events[start:]
                        ]
                    except Exception as error:
                        found[key] = f"{type(error).__name__}: {str(error)[:200]}"
            except Exception as error:
                found[group] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def canonical(events: Any) -> list[tuple[str, int]]:
    """Return the sizes requested and freed, in order, without addresses."""
    sizes: dict[int, int] = {}
    out = []
    for action, key, size, *_ in events:
        if action == "alloc":
            sizes[key] = size
            out.append(("alloc", size))
        else:
            out.append(("free", sizes.pop(key, size)))
    return out


def compare(path: Path, group: str, show: int) -> None:
    """Print the cases that differ."""
    with gzip.open(path, "rt") as file:
        real = json.load(file)
    version = tuple(int(x) for x in real["torch"].split("+")[0].split(".")[:2])
    sim = simulated((9, 0), 132, (version[0], version[1]))
    same = failed = shown = 0
    for key, events in real["cases"].items():
        if group not in key:
            continue
        ours = sim.get(key, "not run")
        if isinstance(events, str) or isinstance(ours, str):
            both = isinstance(events, str) and isinstance(ours, str)
            if not both:
                failed += 1
                print(
                    f"? {key}\n    gpu {events if isinstance(events, str) else 'ran'}\n"
                    f"    sim {ours if isinstance(ours, str) else 'ran'}"
                )
            continue
        a, b = canonical(events), canonical(ours)
        if a == b:
            same += 1
            continue
        failed += 1
        if shown < show:
            shown += 1
            order = sorted(x for x in a if x[0] == "alloc") == sorted(x for x in b if x[0] == "alloc")
            print(f"{'~' if order else '!'} {key}")
            print("    gpu", " ".join(f"{'+' if x == 'alloc' else '-'}{n}" for x, n in a[:40]))
            print("    sim", " ".join(f"{'+' if x == 'alloc' else '-'}{n}" for x, n in b[:40]))
            print(
                "   ",
                "; ".join(f"{op.replace('aten::', '')} {n}" for action, _, n, op in ours if action == "alloc")[:600],
            )
    print(f"{same} the same, {failed} differ")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gpu", "compare"])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("probes.json.gz"))
    parser.add_argument("--group", default="")
    parser.add_argument("--show", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.what == "gpu":
        on_gpu(arguments.out)
    else:
        compare(arguments.file, arguments.group, arguments.show)


if __name__ == "__main__":
    main()
