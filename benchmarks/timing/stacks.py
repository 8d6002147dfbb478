"""Measure how long stacking samples into a batch takes the CPU, and compare the prices of ``timing/collation.py``.

``python benchmarks/timing/stacks.py measure --out FILE.jsonl [--time-limit 60]`` runs on a machine with a GPU: of
samples of seven sizes it stacks 4 to 90 MB, between other work for the GPU, first with PyTorch's threads and then with
one.  ``python benchmarks/timing/stacks.py compare FILE.jsonl`` prints measured times beside the prices at the pace that
the probe had meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

SIZES = (65_536, 122_880, 196_608, 602_112, 1_048_576, 1_806_336, 4_915_200)
"""Bytes of a sample."""
TOTALS = (4e6, 16e6, 30e6, 33e6, 37e6, 60e6, 90e6)
"""Bytes of a batch."""
REPEATS = 7
BETWEEN = 4e-3
"""Seconds of other work between two batches."""


def measure(out: Path, time_limit: float) -> None:
    """Stack batches until the time is up, and write a line for each size, number and count of threads."""
    import torch
    from torch.utils.data import default_collate

    from trainatomy.measurement.calibration.calibrate import environment
    from trainatomy.measurement.device.host_probe import probe_seconds

    factor = torch.randn(2048, 2048, device="cuda")
    numbers = torch.randn(int(max(TOTALS)) // 4)
    ending = time.perf_counter() + time_limit
    lines: list[dict[str, Any]] = [{"environment": environment(), "threads": torch.get_num_threads()}]
    for threads, size, total in product((torch.get_num_threads(), 1), SIZES, TOTALS):
        if time.perf_counter() > ending:
            break
        torch.set_num_threads(threads)
        count, elements = max(int(total // size), 1), size // 4
        samples = [sample.clone() for sample in numbers[: count * elements].view(count, elements)]
        seconds, probes = [], []
        for _ in range(REPEATS):
            probes.append(probe_seconds())
            busy_until = time.perf_counter() + BETWEEN
            while time.perf_counter() < busy_until:
                factor @ factor
            torch.cuda.synchronize()
            began = time.perf_counter()
            batch = default_collate([{"x": sample} for sample in samples])
            seconds.append(time.perf_counter() - began)
            batch["x"].to("cuda")
            del batch
        lines.append({"threads": threads, "size": size, "n": count, "stack": sorted(seconds), "probe": probes})
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def compare(path: Path) -> None:
    """Print each batch's time beside its price, and the median of their ratios."""
    from trainatomy.catalog.hosts import reference_host
    from trainatomy.results.operations import Array
    from trainatomy.timing.collation import stacking_seconds
    from trainatomy.timing.host_costs import cpu_costs

    host, ratios = reference_host(), []
    ((name, quiet),) = host.probe_seconds.items()
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "size" not in line:
            continue
        pace = (median(line["probe"]) / quiet) ** host.pace_exponents[name]
        costs = cpu_costs(host.microseconds | {"threads": line["threads"]}, None, pace, 1.0, host.copy_exponent)
        batch = Array((line["n"], line["size"] // 4), (line["size"] // 4, 1), "float32", 4, 0, on_host=True)
        seconds, price = median(line["stack"]), stacking_seconds(batch, costs)
        ratios.append(seconds / price)
        print(
            f"{line['threads']:2} threads, {line['n']:4} samples of {line['size'] / 1e3:.0f} kB:"
            f" {seconds * 1e3:.2f} ms, price {price * 1e3:.2f} ms ({ratios[-1]:.2f}) at a pace of {pace:.2f}"
        )
    print(f"{len(ratios)} batches take {median(ratios):.2f} of their price in the median")


def main() -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--time-limit", type=float, default=60)
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.out, options.time_limit)
    else:
        compare(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
