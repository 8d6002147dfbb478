"""Make prices of recurrent layers' products from the records, and compare those of held-out networks.

python benchmarks/timing/recurrent_points.py fit [--half]   # the forms for efficiency.yaml (recurrent, product)
python benchmarks/timing/recurrent_points.py write [--half] # catalog/recurrent_products.csv, from all records
python benchmarks/timing/recurrent_points.py compare        # recurrent-timelines-*: whole passes, by halves

``--half`` leaves out every other network, which ``compare`` then judges.  Older records (``recurrent_layers.py``) have
the kernels of a pass together: where the CPU launched a stack of one direction slowly, its products ran alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import exp, log, log2
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))
sys.path.append(str(HERE.parent / "accuracy"))

import recurrent_layers  # noqa: E402
import trainings  # noqa: E402

from trainatomy.catalog.gpus import find_gpu  # noqa: E402
from trainatomy.catalog.hosts import reference_host  # noqa: E402
from trainatomy.operators.cost import recurrent_products  # noqa: E402
from trainatomy.operators.cost.recurrence import Recurrence, recurrence  # noqa: E402
from trainatomy.operators.cost.recurrent import longer_loading, longer_than_measured  # noqa: E402
from trainatomy.operators.cost.recurrent_products import RecurrentProduct  # noqa: E402
from trainatomy.timing.cost_model import cost_model_of, kernel_cost  # noqa: E402

RECORDS = HERE / "records"
GPUS = ("h200", "h100-sxm")
OLDER = ("wide", "queued", "short")
POINTS = HERE.parents[1] / "src/trainatomy/catalog/recurrent_products.csv"
HEADER = "# kind,role,rows,columns,depth,kernels at a time,microseconds\n"
DTYPES = {"fp16": "float16", "bf16": "float16", "tf32": "float32", "fp32": "float32"}
"""What autocast makes of a training's precision; cuDNN multiplies fp32 as TF32."""
SLOW_HOST = 0.6
"""Share of the CPU's time for a time step below which the GPU is taken to compute it alone."""
GATES = 1.3
"""Time of a step with its gates, in times of its product."""
SAME = 8
"""Kernels at a time are alike within an eighth of a doubling."""


class Point(NamedTuple):
    """A measured product; ``held_out``: whether ``--half`` leaves it out."""

    product: RecurrentProduct
    at_a_time: float
    us: float
    held_out: bool


def calls_of(line: dict[str, Any]) -> tuple[Any, Any]:
    """Return the calls of forward and backward of a network of ``recurrent_timelines.py``."""
    named = {"num_layers": line["layers"], "bidirectional": line["both"], "dtype": DTYPES[line["precision"]]}
    return recurrent_layers.calls({**line, **named})


def points() -> list[Point]:
    """Return the products of all records, the mean of equal ones."""
    found = defaultdict(list)
    for point in chain(_of_networks(), _of_layers(), _of_older()):
        found[point.product, round(log2(max(point.at_a_time, 1)) * SAME), point.held_out].append(point)
    return [
        Point(
            product,
            sum(one.at_a_time for one in equal) / len(equal),
            exp(sum(log(one.us) for one in equal) / len(equal)),
            held_out,
        )
        for (product, _, held_out), equal in found.items()
    ]


def _timelines(part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for gpu_id in GPUS:
        for line in trainings.lines(RECORDS / f"recurrent-timelines-{gpu_id}.jsonl.gz"):
            if line["part"] == part and "error" not in line:
                yield gpu_id, line


def _of_networks() -> Iterator[Point]:
    for gpu_id, line in _timelines("network"):
        longer = _longer_on(gpu_id)
        for name, roles in line["passes"].items():
            one = recurrence(calls_of(line)[name.endswith("backward")], "tf32")
            if "step" not in roles:
                continue
            held_out = bool(line["case"] % 2)
            _, us, beside = roles["step"][0]
            yield Point(_step_of(one), beside, (us - _longer_loading_us(gpu_id, one, beside)) / longer, held_out)
            if len(roles["inputs"]) == len(one.pairs):
                for (of_inputs, _), (_, us, beside) in zip(one.pairs, roles["inputs"], strict=True):
                    yield Point(_inputs_of(one, *of_inputs.shape), beside, us / longer, held_out)


def _of_layers() -> Iterator[Point]:
    for gpu_id, line in _timelines("layer"):
        longer = _longer_on(gpu_id)
        shape = {"sizes": (256, line["hidden"]), "shape": (line["batch"], 6), "num_layers": 1, "bidirectional": False}
        for call, roles in zip(recurrent_layers.calls({**line, **shape}), line["passes"].values(), strict=True):
            if "step" in roles:
                one = recurrence(call, "tf32")
                us = (roles["step"][0][1] - _longer_loading_us(gpu_id, one, 1.0)) / longer
                yield Point(_step_of(one), 1.0, us, bool(line["case"] % 2))


def _longer_on(gpu_id: str) -> float:
    """Return how many times as long products take on a GPU as on the one whose times are stored."""
    return longer_than_measured(cost_model_of(find_gpu(gpu_id)).chip, "products")


def _longer_loading_us(gpu_id: str, one: Recurrence, beside: float) -> float:
    """Return how many microseconds longer a product of a time step loads on a GPU than on that one."""
    return longer_loading(cost_model_of(find_gpu(gpu_id)).chip, one, beside) * 1e6


def _step_of(one: Recurrence) -> RecurrentProduct:
    columns, depth = (one.hidden, one.gates) if one.backward else (one.gates, one.hidden)
    return RecurrentProduct(one.step_kind, one.pass_name, one.batch, columns, depth)


def _inputs_of(one: Recurrence, gates: int, inputs: int) -> RecurrentProduct:
    columns, depth = (inputs, gates) if one.backward else (gates, inputs)
    rows = one.steps_at_a_time * one.batch
    return RecurrentProduct(one.kind_of(gates, inputs), f"inputs {one.pass_name}", rows, columns, depth)


def _of_older() -> Iterator[Point]:
    for name in OLDER:
        for line in trainings.lines(RECORDS / f"recurrent-{name}-h200.jsonl.gz"):
            for place, (call, part) in enumerate(
                zip(recurrent_layers.calls(line), ("forward", "backward"), strict=True)
            ):
                one = recurrence(call, "tf32" if line.get("tf32", True) else "fp32")
                if one.is_fused or (line["dtype"] == "bfloat16" and one.is_odd(one.hidden)):
                    continue
                of_step = line["cpu_us"][place] / (one.steps * len(one.pairs))
                for source in filter(None, (line, line.get("queued"))):
                    yield from _of_pass(
                        one, source, part, None if source is not line else of_step, line["split"] != "fit"
                    )


def _of_pass(
    one: Recurrence, source: dict[str, Any], part: str, cpu_us: float | None, held_out: bool
) -> Iterator[Point]:
    """Yield the products of a pass; ``cpu_us``: the CPU's time for a time step, None behind other work."""
    around = recurrent_layers.AROUND
    kernels = {name: (runs, us) for name, (runs, us) in source[part].items() if not name.startswith(around)}
    steps, beside = one.steps * len(one.pairs), max(source["at_once"][part][0], 1.0)
    products = {name: found for name, found in kernels.items() if "gemm" in name or "nvjet" in name}
    helpers = [found for name, found in kernels.items() if "Memset" in name or "splitKreduce" in name]
    walking = {name: found for name, found in products.items() if not _is_of_weights(name)}
    of_steps, rest, runs, us = steps - len(one.pairs) if one.backward else steps, 0.0, 0.0, 0.0
    rest_us = 0.0
    for each_runs, each_us in sorted(walking.values(), reverse=True):
        if runs < 0.9 * of_steps and runs + each_runs <= 1.02 * steps and each_runs >= 0.08 * steps:
            runs, us = runs + each_runs, us + each_us
        else:
            rest, rest_us = rest + each_runs, rest_us + each_us
    if not 0.9 * of_steps <= runs <= 1.02 * steps:
        return
    us += sum(each_us for each_runs, each_us in helpers if each_runs >= 0.9 * of_steps)
    is_single = len(one.pairs) == 1
    if cpu_us is not None and one.kind != "fp32" and one.product_kind != "tf32_misaligned":
        if not is_single and (one.directions == 2 or us / runs * GATES > SLOW_HOST * cpu_us):
            return  # not known how many ran beside each
        beside = 1.0
    yield Point(_step_of(one), beside, us / runs, held_out)
    shapes = {of_inputs.shape for of_inputs, _ in one.pairs}
    if rest and len(shapes) == 1 and rest == one.parts * len(one.pairs):
        rest_us += sum(each_us for each_runs, each_us in helpers if each_runs <= min(1.1 * rest, 0.9 * of_steps))
        yield Point(_inputs_of(one, *shapes.pop()), beside, rest_us / rest, held_out)


def _is_of_weights(name: str) -> bool:
    return "_nt_" in name.split(">")[0] or name.split(" ")[0].endswith(("NTT", "NTN"))


def fit(half: bool) -> None:
    """Print the forms by robust least squares of the logarithms."""
    from scipy.optimize import least_squares

    groups = defaultdict(list)
    for point in points():
        if not (half and point.held_out):
            groups[point.product.kind, point.product.role].append(point)
    for (kind, role), own in sorted(groups.items()):
        tiles = len(recurrent_products.TILES) - 1 if role.startswith("inputs") else 2
        uneven = 0.0 if kind == "fp32" or kind.endswith("misaligned") else 0.2

        def errors(form: Sequence[float], own: Sequence[Point] = own) -> list[float]:
            sms = recurrent_products.MEASURED_MULTIPROCESSORS
            times = (recurrent_products.estimate(one.product, form, one.at_a_time, sms) * 1e6 for one in own)
            return [log(us / one.us) for us, one in zip(times, own, strict=True)]

        limits = [0.5, 0.05, 0.05, 0, 0, *[1] * tiles], [60, 50, 8, 2.5, uneven + 1e-9, *[20] * tiles]
        starts = ([3, 2, 1.2, 1, 0, 1.4, 2.4, 3.5, 5], [4, 1, 2, 1.5, uneven / 3, 1.8, 3, 5, 8])
        solved = (
            least_squares(
                errors, start[: 5 + tiles], bounds=limits, loss="soft_l1", f_scale=0.1, diff_step=1e-3, x_scale="jac"
            )
            for start in starts
        )
        best = min(solved, key=lambda one: one.cost)
        form = [float(f"{value:.3g}") if value > 1e-5 else 0.0 for value in best.x]
        off = median(abs(exp(error) - 1) for error in errors(form))
        print(f"    {kind}: {role}: {form}  # {len(own)} products, off {off:.1%} in the median")


def write(half: bool) -> None:
    """Write the points."""
    lines = [
        f"{','.join(map(str, one.product))},{one.at_a_time:.2f},{one.us:.2f}"
        for one in sorted(points())
        if not (half and one.held_out)
    ]
    POINTS.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} products")


def compare() -> None:
    """Print the errors of both passes of the networks, in trainings at the host's pace and behind other work."""
    host = reference_host()
    (probe, quiet), *_ = host.probe_seconds.items()
    found = defaultdict(list)
    for gpu_id, line in _timelines("network"):
        middle = sorted(line["pace_us"])[1:-1]
        pace = (sum(middle) / len(middle) / quiet / 1e6) ** host.pace_exponents[probe]
        model = cost_model_of(find_gpu(gpu_id))
        for queued, host_pace in ((False, pace), (True, 1e-3)):
            own = replace(model, chip=model.chip._replace(host_pace=host_pace), cache={})
            ours = sum(kernel_cost(call, own).seconds for call in calls_of(line)) * 1e6
            names = [name for name in line["passes"] if name.startswith("queued") is queued]
            measured = sum(line["passes"][name]["us"] for name in names)
            found[gpu_id, queued, bool(line["case"] % 2)].append(ours / measured - 1)
    for (gpu_id, queued, held_out), errors in sorted(found.items()):
        off = sorted(map(abs, errors))
        about = f"{gpu_id} {'queued' if queued else 'in a training':13} {'held out' if held_out else 'fitted':8}"
        nine = off[int(0.9 * len(off))]
        print(f"{about} {len(off):3} mean {median(errors):+6.1%} off {median(off):5.1%} {nine:5.1%} {off[-1]:5.1%}")


def main() -> int:
    """Fit, write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fit", "write", "compare"))
    parser.add_argument("--half", action="store_true")
    options = parser.parse_args()
    if options.command == "compare":
        compare()
    else:
        (fit if options.command == "fit" else write)(options.half)
    return 0


if __name__ == "__main__":
    sys.exit(main())
