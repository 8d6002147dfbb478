"""Judge how far apart the plans of convolutions are (``operators/cost/plans.py``), by leaving points out.

``python benchmarks/timing/plan_distances.py [--distances 4,2,0.25]``, with cuDNN's library, prices each convolution
that was measured inside a training on an H200 without the points of its own shape, with and without what the library
says about plans.  It prints the error of the logarithm, and how many trainings are off by more than 12 % in all of
their convolutions.  ``--distances`` tries others: of another engine, of another setting, of a doubling of the parts.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import drawn_kernels  # noqa: E402
import training_points  # noqa: E402
import trainings  # noqa: E402

from trainatomy.catalog.calibrations import Calibration, Point, shipped  # noqa: E402
from trainatomy.catalog.calls import from_text, to_text  # noqa: E402
from trainatomy.operators.cost import kernel_work, plans  # noqa: E402
from trainatomy.operators.cost.kernel import Chip, KernelWork  # noqa: E402
from trainatomy.timing import cost_model  # noqa: E402
from trainatomy.timing.efficiency import EfficiencyPoint, FamilyPoints, price_point  # noqa: E402

GPU, FEWEST, BEYOND = "h200", 3, 0.12
KINDS = ("_OTHER_ENGINE", "_OTHER_SETTING", "_SPLIT")
Key = tuple[str, bool]
"""A call as calibrations write it, without what the library says, and whether fp32 products use TF32."""


class Measured(NamedTuple):
    """A convolution of a training: its key, its work, the time that it took, and the log efficiency that it had."""

    training: str
    key: Key
    work: KernelWork
    microseconds: float
    log_efficiency: float


def measured(calibration: Calibration, chip: Chip) -> Iterator[Measured]:
    """Yield the convolutions of all trainings that were measured call by call."""
    files = sorted((HERE / "records").glob(f"*-calls-{GPU}.jsonl.gz"))
    lines = [line for file in files if not file.name.startswith("first") for line in trainings.lines(file)]
    for line in training_points._large_calls(lines):
        if "convolution" not in line["call"]:
            continue
        tf32 = line.get("tf32", False)
        call = drawn_kernels.with_plans(from_text(line["call"]), calibration.known_gpu)
        point = Point(to_text(call), line["us"], None, round(line["kernels"]), tf32)
        if (priced := price_point(0, point, chip)) is not None:
            work = kernel_work(call, chip._replace(tf32=tf32, cudnn_tf32=True))
            key = drawn_kernels.without_step(point.text), tf32
            yield Measured(line["training"], key, work, line["us"], priced.point.log_efficiency)


def known_points(calibration: Calibration, chip: Chip) -> dict[str, list[tuple[Key, EfficiencyPoint]]]:
    """Return the points of convolutions by family, with their keys."""
    found = defaultdict(list)
    for point in calibration.points:
        if "convolution" in point.text and (priced := price_point(0, point, chip)) is not None:
            found[priced.family].append(((drawn_kernels.without_step(point.text), point.tf32), priced.point))
    return found


def judge(
    title: str, every: Sequence[Measured], known: Mapping[str, list[tuple[Key, EfficiencyPoint]]], *, with_plans: bool
) -> None:
    """Print the errors of all convolutions, each priced without the points of its own shape."""
    errors: list[float] = []
    off: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    for one in every:
        others = FamilyPoints(point for key, point in known.get(one.work.family, ()) if key != one.key)
        if len(others) < FEWEST:
            continue
        error = others.interpolate(one.work.features, one.work.plans if with_plans else ()) - one.log_efficiency
        errors.append(abs(error))
        off[one.training] += one.microseconds * (exp(error) - 1)
        whole[one.training] += one.microseconds
    beyond = sum(abs(off[name]) > BEYOND * whole[name] for name in whole)
    spread = fmean(error**2 for error in errors) ** 0.5
    print(
        f"{title}: {len(errors)} convolutions, mean {fmean(errors):.4f}, RMS {spread:.3f};"
        f" {beyond} of {len(whole)} trainings beyond {BEYOND:.0%}",
        flush=True,
    )


def main() -> int:
    """Judge the distances of today, or others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distances", help="squared, with commas between")
    options = parser.parse_args()
    calibration = shipped()[GPU]
    chip = cost_model.cost_model_of(calibration.known_gpu).chip
    every, known = list(measured(calibration, chip)), known_points(calibration, chip)
    if not any(one.work.plans for one in every):
        raise SystemExit('plans need cuDNN\'s library: pip install "trainatomy[cudnn]"')
    judge("without plans", every, known, with_plans=False)
    if options.distances:
        for kind, distance in zip(KINDS, map(float, options.distances.split(",")), strict=True):
            setattr(plans, kind, distance)
    judge("with plans", every, known, with_plans=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
