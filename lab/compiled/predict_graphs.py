"""Predict what ``graphs.py`` measures: the memory of each step, and the segments of each pool.

``python lab/compiled/predict_graphs.py --out FILE.jsonl [--cases graphs_tuned] [--gpu h200] [--names a,b]``
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from graphs import SEEN
from predict import one_by_one, write


def pools(allocator: Any) -> dict[str, list[list[int]]]:
    """Return each memory pool's segments: their sizes, and what is allocated in them."""
    from trainatomy.results.trace import pool_of

    found: dict[str, list[list[int]]] = {}
    for segment in allocator.snapshot():
        entry = [segment.size, segment.allocated_bytes]
        found.setdefault(str((0, pool_of(segment.stream))), []).append(entry)
    return {pool: sorted(entries, reverse=True) for pool, entries in found.items()}


def predicted(case: dict[str, Any], gpu_id: str, mode: str | None) -> dict[str, Any]:
    """Return a training's memory by step, and its times."""
    from trainatomy.allocator.replay import RecordingPlayer
    from trainatomy.allocator.settings import AllocatorSettings
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.prediction.assemble import analysis_of, step_of, time_of
    from trainatomy.simulator.simulate import simulate
    from trainatomy.timing.cost_model import kernel_cost
    from trainatomy.workload import Workload

    content = dict(case["workload"])
    mode = mode or content["train"].get("torch_compile_mode", "reduce-overhead")
    content["train"] = {**content["train"], "torch_compile": True, "torch_compile_mode": mode}
    gpu = find_gpu(gpu_id)
    workload = Workload.model_validate({**content, "gpu": gpu_id})
    simulation = simulate(workload, gpu)
    player = RecordingPlayer(simulation.trace, AllocatorSettings())
    allocator, steps, segments = player.allocator, [], {}
    for mark in simulation.trace.marks:
        if mark.name == "step end":
            player.play(mark.event)
            steps.append(
                {
                    "allocated_bytes.current": allocator.allocated_bytes,
                    "allocated_bytes.peak": allocator.peak_allocated_bytes,
                    "reserved_bytes.current": allocator.reserved_bytes,
                    "reserved_bytes.peak": allocator.peak_reserved_bytes,
                }
            )
            allocator.peak_allocated_bytes = allocator.allocated_bytes
            allocator.peak_reserved_bytes = allocator.reserved_bytes
            if mark.step + 1 in SEEN:
                segments[mark.step + 1] = pools(allocator)
    analysis = analysis_of(workload, simulation, None)
    step = step_of(workload, simulation, simulation.operations, None, analysis.driver_calls)
    operations = simulation.operations
    costs = [kernel_cost(call, step.cost_model).seconds for call in operations.calls]
    counts = Counter(operation.call for operation in operations.operations)
    timed = time_of(workload, simulation, analysis.driver_calls, None)
    return {
        "peak_allocated": analysis.memory.peak_allocated_bytes,
        "peak_reserved": analysis.memory.peak_reserved_bytes,
        "steps": steps,
        "segments": segments,
        "gpu_ms": round(sum(costs[call] * count for call, count in counts.items()) * 1e3, 3),
        "step_ms": round(timed.step_seconds * 1e3, 3),
        "captured": sum(operation.captured for operation in operations.operations),
        "launched": sum(not operation.captured for operation in operations.operations),
        "notes": [note for note in simulation.notes if any(word in note for word in ("ompile", "ynamo", "CUDA graph"))],
    }


def run_case(gpu_id: str, mode: str | None, out: Path, name: str, case: dict[str, Any]) -> None:
    """Predict a training in this process, and write its line."""
    write(out, {"name": name, "mode": mode or ""}, partial(predicted, case, gpu_id, mode))


def main() -> None:
    """Predict the trainings one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="graphs_tuned")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--mode", help="instead of each training's own")
    parser.add_argument("--names", default="")
    arguments = parser.parse_args()
    one_by_one(arguments.cases, arguments.names, partial(run_case, arguments.gpu, arguments.mode, arguments.out))


if __name__ == "__main__":
    main()
