"""Measure convolutions of networks at batches that no draw of trainings has, where a calibration has no like point.

python benchmarks/timing/network_convolutions.py find --out FILE [--part 0/2]                     (with cuDNN's library)
python benchmarks/timing/network_convolutions.py measure --calls FILE... --out FILE [--time-limit 400]       (on a GPU)

``find`` simulates the candidates of ``drawn_trainings.py`` at other batches and writes the convolutions of which no
point of the H200's calibration is near in sizes and plan, with their share of the step.  ``measure`` runs them, those
with the largest shares first, forward and backward, as ``drawn_kernels.py`` runs those that it draws;
``training_points.py`` adds what they say to a calibration.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "accuracy")]

import drawn_kernels  # noqa: E402
import drawn_trainings  # noqa: E402
import grid  # noqa: E402
import trainings  # noqa: E402

from trainatomy.catalog.calls import from_text, to_text  # noqa: E402
from trainatomy.operators.cost.kernel import geometry_of, number, wanted_gradients, whole_numbers  # noqa: E402
from trainatomy.results.operations import Call  # noqa: E402

FACTORS = (1.2, 0.68, 1.62, 0.82, 1.3, 0.55, 1.9, 2.0, 0.4)
"""Multiples of a candidate's usual batch, of which the first are taken that no draw has."""
BATCHES = 3
PRECISIONS = ("bf16", "fp32", "fp16")
LEAST_OF_ALL, LEAST_OF_ONE = 0.12, 0.002
"""Least share of a step's GPU time that all convolutions take, and one call."""
FAR = 0.3
"""Squared distance to the nearest point, in doublings of size, from which on a call is written."""
BACKWARD = "aten::convolution_backward"
TOGETHER = 24
"""Cases that are profiled together."""


def candidates() -> dict[str, dict[str, Any]]:
    """Return the trainings to look at: the drawn models at batches that no draw gives them, in each precision."""
    sets, found = drawn_trainings.sets(), dict[str, dict[str, Any]]()
    for family in (*sets["usual"].values(), *sets["all others"].values()):
        for name, settings in family.items():
            if "quantization" in settings.get("model", {}):
                continue
            factors = drawn_trainings.FACTORS + drawn_trainings.LATER_FACTORS
            taken, batches = {max(round(settings["batch"] * factor), 1) for factor in factors}, list[int]()
            for factor in FACTORS:
                batch = max(round(settings["batch"] * factor), 1)
                batches += [batch] if batch not in taken and batch not in batches else []
            for batch in batches[:BATCHES]:
                row = {**settings, "batch": batch}
                for precision in PRECISIONS:
                    named = row if precision == "fp32" else {**row, "precision": precision}
                    found[f"{name}-{precision}-of-{batch}"] = named
    return found


def find(out: Path, part: int, parts: int) -> None:
    """Write the convolutions of the candidates that no point is near to; ``part`` of ``parts`` of the models."""
    chosen = candidates()
    models = sorted({_model(name) for name in chosen})[part::parts]
    listed, without = out.with_suffix(".yaml"), set[str]()
    names = sorted((name for name in chosen if _model(name) in models), key=_model)
    listed.write_text("rows:\n" + "".join(f"  {name}: {json.dumps(chosen[name])}\n" for name in names), "utf-8")
    with out.open("w", encoding="utf-8") as file:
        for row in grid.rows(listed, trainings.TRAININGS):
            if _model(row.name) in without:
                continue
            try:
                lines = list(_far_convolutions(row))
            except Exception as error:
                print(f"{row.name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                lines = []
            without |= set() if lines else {_model(row.name)}
            file.writelines(json.dumps(line) + "\n" for line in lines if line["distance"] > FAR)
            file.flush()


def _model(name: str) -> str:
    return name.rpartition("-of-")[0].rpartition("-")[0]


def _far_convolutions(row: Any) -> Iterator[dict[str, Any]]:
    """Yield the larger convolutions of a training, if these take enough of its time, with the nearest distance."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.operators.cost import kernel_work
    from trainatomy.simulator.simulate import simulate
    from trainatomy.timing.cost_model import cost_model_of, kernel_cost

    gpu = find_gpu("h200")
    workload = row.workload(HERE).model_copy(update={"gpu": gpu.id})
    operations, model = simulate(workload, gpu).operations, cost_model_of(gpu, tf32=None)
    runs: dict[int, int] = defaultdict(int)
    for one in operations.operations:
        runs[one.call] += one.repeats
    seconds = [kernel_cost(call, model).seconds * runs[index] for index, call in enumerate(operations.calls)]
    whole = sum(seconds)
    of_convolutions = {place: call for place, call in enumerate(operations.calls) if "convolution" in call.name}
    if sum(seconds[place] for place in of_convolutions) < LEAST_OF_ALL * whole:
        return
    for place, call in of_convolutions.items():
        if seconds[place] < LEAST_OF_ONE * whole:
            continue
        work = kernel_work(call, model.chip)
        near = model.points[work.family].nearest(work.features, 1, work.plans) if work.family in model.points else []
        yield {
            "training": row.name,
            "share": round(seconds[place] / whole, 5),
            "us": round(seconds[place] / runs[place] * 1e6, 1),
            "distance": round(near[0][0], 3) if near else 99.0,
            "call": to_text(call),
        }


def cases(lines: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the cases of convolutions, those with the largest shares of a step first; forward and backward are one."""
    shares: dict[Any, float] = defaultdict(float)
    for line in lines:
        if (key := _key(from_text(line["call"]))) is not None:
            shares[key] = max(shares[key], line["share"])
    yield from (_case(*key) for key in sorted(shares, key=lambda key: -shares[key]))


def _key(call: Call) -> tuple[Any, str] | None:
    """Return what both directions of a convolution have in common; ``None`` for forms that are not measured."""
    from trainatomy.measurement.calibration.drawn_convolutions import Shape
    from trainatomy.operators.cost.convolution import is_last

    x, weight = call.inputs[1:3] if call.name == BACKWARD else call.inputs[:2]
    dilation = set(whole_numbers(number(call, "dilation", "1")))
    if len(dilation) > 1 or set(whole_numbers(number(call, "output_padding", "0"))) - {0}:
        return None
    stride, padding, _ = geometry_of(call, len(x.shape) - 2)
    if call.name == BACKWARD:
        wanted = wanted_gradients(call)
        is_stem, has_bias = not wanted[0], wanted[2]
    else:
        is_stem, has_bias = x.shape[1] <= drawn_kernels.MOST_FEW, len(call.inputs) > 2  # the batch gets no gradient
    shape = Shape(
        x.shape, weight.shape, stride, padding, dilation.pop(), int(number(call, "groups", "1")),
        is_last(x), has_bias, number(call, "transposed") == "True", is_stem,
    )  # fmt: skip
    return shape, x.dtype


def _case(shape: Any, dtype: str) -> Any:
    import torch

    from trainatomy.measurement.calibration.cases import Case
    from trainatomy.measurement.calibration.drawn_convolutions import convolved

    return Case(partial(convolved, shape, getattr(torch, dtype)), tf32=True, warm=True, runs=3)


def main() -> int:
    """Find or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    finding = commands.add_parser("find")
    finding.add_argument("--out", type=Path, required=True)
    finding.add_argument("--part", default="0/1", help="which of how many parts of the models")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--calls", type=Path, nargs="+", required=True)
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--time-limit", type=float, default=400)
    options = parser.parse_args()
    if options.command == "find":
        find(options.out, *map(int, options.part.split("/")))
    else:
        found = list(cases(line for path in options.calls for line in trainings.lines(path)))
        batches = [(drawn_kernels.FIT, found[at : at + TOGETHER]) for at in range(0, len(found), TOGETHER)]
        drawn_kernels.measure(options.out, options.time_limit, batches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
