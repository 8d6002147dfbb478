"""Find the allocations behind a difference: ``python lab/accuracy/explain.py TRACE.json.gz [--gpu h200]``.

Reads a trace that was recorded on a GPU (``measure_grid.py --trace``, ``trainatomy measure --trace``), executes the
same training without one, and lists the sizes that one side allocates more often: within a step, and alive at the
peak.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from compare_traces import SizeDifference, compare_peak, compare_step
from outcomes import workload_of

from trainatomy.measurement.traces.history import AllocationHistory
from trainatomy.measurement.traces.history import read as read_history
from trainatomy.measurement.traces.trace import to_trace
from trainatomy.simulator.simulate import simulate
from trainatomy.workload.reading import read
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

ORIGINS_SHOWN = 3


def table(title: str, differences: Sequence[SizeDifference], count: int) -> str:
    """Format the ``count`` largest differences, with the origins of each side's allocations."""
    excess = sum(difference.excess_bytes for difference in differences)
    lines = [f"{title}: {len(differences)} sizes differ, simulated - real = {excess:+,} B"]
    for one in differences[:count]:
        lines.append(f"  {one.bytes:>14,} B  simulated {one.simulated:>5}  real {one.real:>5}  {one.excess_bytes:+,} B")
        lines += [f"      simulated: {text}" for text in one.simulated_origins[:ORIGINS_SHOWN]]
        lines += [f"      real:      {text}" for text in one.real_origins[:ORIGINS_SHOWN]]
    return "\n".join(lines)


def _recorded(history: AllocationHistory, gpu: str) -> Workload:
    """Return the training that the trace describes."""
    return workload_of({"family": "", "alone": False, "held_out": False, **history.case}, gpu)


def main() -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpu", default="h200", help="the GPU that was measured (default: h200)")
    parser.add_argument("--step", type=int, default=1, help="the optimizer step that is compared, from 0 (default: 1)")
    parser.add_argument("--count", type=int, default=20, help="differences shown (default: 20)")
    parser.add_argument("--workload", type=Path, help="the training, where the tape does not hold its description")
    options = parser.parse_args()
    history = read_history(options.trace)
    workload = read(options.workload) if options.workload else _recorded(history, options.gpu)
    simulated, real = simulate(workload, workload.resolve_gpu()).trace, to_trace(history)
    if history.notes:
        differences = compare_step(simulated, real, options.step)
        print(table(f"Allocated in step {options.step}", differences, options.count))
    print(table("Alive at the peak", compare_peak(simulated, real), options.count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
