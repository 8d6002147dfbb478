"""Compare components at the peak with measured ones: ``python benchmarks/accuracy/components.py TRACE.json.gz...``.

Each trace was recorded on a GPU (``measure_grid.py --trace``, ``trainatomy measure --trace``).  It is analysed like a
simulated trace, the same training is predicted, and differences are shares of the total.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outcomes import workload_of

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory
from trainatomy.catalog.workspaces import workspaces
from trainatomy.measurement.traces import history as histories
from trainatomy.measurement.traces.labels import label_remaining
from trainatomy.measurement.traces.trace import to_trace
from trainatomy.simulator.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainatomy.analysis.memory import MemoryAnalysis
    from trainatomy.workload.schema import Workload

LIMIT = 0.01
"""Allowed difference of a component, as a share of the total."""
OUTSIDE = ("cache", "context")


def both(path: Path, gpu: str) -> tuple[MemoryAnalysis, MemoryAnalysis]:
    """Analyse the recorded trace and the simulated one."""
    history = histories.read(path)
    workload = workload_of({"family": "", "alone": False, "held_out": False, **history.case}, gpu)
    real = to_trace(history)
    version = _version(workload)
    followed = {note.step for note in history.notes if note.name == "call"}
    label_remaining(real, workspaces(workload.resolve_gpu().capability, version), sorted(followed))
    settings = AllocatorSettings.parse(workload.allocator, version)
    size = workload.resolve_gpu().memory_bytes
    return analyze_memory(real, settings, size, 0), analyze_memory(
        simulate(workload, workload.resolve_gpu()).trace, settings, size, 0
    )


def _version(workload: Workload) -> tuple[int, int]:
    major, minor = (workload.software.torch or "").split(".")[:2]
    return int(major), int(minor)


def gaps(real: MemoryAnalysis, simulated: MemoryAnalysis) -> dict[str, float]:
    """Return predicted minus measured bytes of each component, as a share of allocated memory."""
    measured, predicted = _parts(real), _parts(simulated)
    total = real.memory.peak_allocated_bytes
    return {name: (predicted[name] - size) / total for name, size in measured.items()}


def _parts(settled: MemoryAnalysis) -> Mapping[str, int]:
    components = settled.memory.components.as_dict()
    return {name: size for name, size in components.items() if name not in OUTSIDE}


def describe(name: str, real: MemoryAnalysis, simulated: MemoryAnalysis) -> str:
    """Format a line for the row, and one for each part of the breakdown that differs."""
    differences = gaps(real, simulated)
    worst = max(differences, key=lambda key: abs(differences[key]))
    instants = " / ".join(f"{one.peak.phase} of step {one.peak.step}" for one in (real.memory, simulated.memory))
    text = [f"{name:44} {differences[worst] * 100:+8.3f} %  {worst:18} peak: {instants}"]
    if abs(differences[worst]) <= LIMIT:
        return text[0]
    ours = {(line.component, line.name): line for line in simulated.memory.lines}
    theirs = {(line.component, line.name): line for line in real.memory.lines}
    for key in sorted(ours.keys() | theirs.keys()):
        sizes = [side[key].bytes if key in side else 0 for side in (theirs, ours)]
        counts = [side[key].tensors if key in side else 0 for side in (theirs, ours)]
        if sizes[0] != sizes[1]:
            both_sides = f"measured {sizes[0]:>14,} ({counts[0]})  predicted {sizes[1]:>14,} ({counts[1]})"
            text.append(f"    {'/'.join(key):52} {both_sides}")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return 1 where a component differs by more than ``LIMIT``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--gpu", default="h200", help="the GPU that was measured (default: h200)")
    options = parser.parse_args(arguments)
    wrong = 0
    for path in options.traces:
        real, simulated = both(path, options.gpu)
        wrong += any(abs(gap) > LIMIT for gap in gaps(real, simulated).values())
        print(describe(path.name.split(".tape")[0], real, simulated), flush=True)
    print(f"{len(options.traces)} tapes, {wrong} with a component that differs by more than {LIMIT:.0%} of the total")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
