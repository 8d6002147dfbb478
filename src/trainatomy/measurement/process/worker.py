"""The process that uses the GPU.

Run as ``python -m trainatomy.measurement.process.worker WORKLOAD.json RESULT.json [--trace FILE]``.

Its result, or the error that took its place, is in RESULT.json when it ends; whatever it prints is for the log.  The
allocator's options are set before PyTorch is imported, because PyTorch reads them once.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.process.job import DEFAULT_STEPS, STACKS, Job, set_environment, write_result

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker; 0 also where the result is an error of the workload's, which the caller will raise."""
    options = _parser().parse_args(arguments)
    workload = json.loads(options.workload.read_text(encoding="utf-8"))
    set_environment(os.environ, workload.get("allocator", ""))
    job = Job(workload, options.steps, options.trace, options.stacks, alone=not options.shared)
    execute(job, options.result)
    return 0


def execute(job: Job, result: Path) -> None:
    """Run ``job`` in this process and write its result."""
    from trainatomy.measurement.step import (
        on_card,  # imports torch, whose allocator reads the environment that was just set
    )

    try:
        outcome = on_card.run(job)
    except TrainatomyError as error:
        write_result(result, error)
    else:
        write_result(result, outcome)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainatomy.measurement.process.worker", description=__doc__)
    parser.add_argument("workload", type=Path, metavar="WORKLOAD.json", help="the mapping of a workload file, as JSON")
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="where the result goes")
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps where the workload does not say"
    )
    parser.add_argument("--trace", type=Path, help="write the stream of allocations here (gzipped JSON)")
    parser.add_argument(
        "--stacks", choices=STACKS, default="none", help="with --trace: where each allocation came from"
    )
    parser.add_argument(
        "--shared", action="store_true", help="other processes use the card: read this one's memory only"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
