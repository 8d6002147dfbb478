"""Measure and judge kernels of random shapes: those that a calibration may use, and those held out.

On a machine with a GPU, ``python benchmarks/timing/drawn_kernels.py measure --out FILE.jsonl --time-limit 140`` appends
a line for each call: the calibration's point, and ``split``, ``fit`` or ``held out``, by the seed of its case
(``trainatomy.measurement.calibration.drawn``).  Both are measured in turns, so that a time limit cuts both short.

Anywhere, ``drawn_kernels.py compare FILE.jsonl [--split fit] [--by family|operator]`` predicts each call and prints the
errors, ``drawn_kernels.py add FILE.jsonl CALIBRATION.json`` adds the points to be used to a calibration.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import processes  # noqa: E402

from trainatomy.catalog.calls import from_text, to_text  # noqa: E402
from trainatomy.catalog.gpus import find_gpu  # noqa: E402
from trainatomy.operators.allocation.cudnn.ways import say_plans  # noqa: E402
from trainatomy.operators.cost import kernel_work, plans  # noqa: E402
from trainatomy.operators.cost.kernel import Chip, number  # noqa: E402
from trainatomy.operators.cost.ways import ARGUMENT  # noqa: E402
from trainatomy.results.operations import Call  # noqa: E402
from trainatomy.simulator.cudnn import installed_heuristics  # noqa: E402
from trainatomy.timing.cost_model import cost_model_of, kernel_cost  # noqa: E402

FIT, HELD_OUT = "fit", "held out"
FEWEST = 3
ALWAYS = (
    "apart.",
    "bitsandbytes.",
    "channels_last_norm.",
    "convolution.",
    "grouped.",
    "matmul.",
    "normalisation.native_batch_norm",
    "normalisation.native_group_norm",
    "parts.",
    "patches.",
    "pooling.",
    "rearranged.",
    "recurrent.",
    "reduction.",
    "resampling",
    "scan.",
    "short rows.",
    "table.",
    "traffic.broadcast.",
    "traffic.rows.",
    "traffic.transposed.",
)
"""Families that get all points, because a calibration has few kinds of them."""
_WRAPPERS = ("gemm_4bit", "gemv_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm")
WRAPPED = tuple(f"bitsandbytes::{name}(" for name in _WRAPPERS)
"""Operators of bitsandbytes whose Python may run several kernels, which a simulation writes as operations each."""
FALLBACKS = (
    "wgrad_alg1",
    "dgrad2d_alg1",
    "dgrad_engine",
    "dgrad_float_engine",
    "dgrad2d_grouped_direct",
    "wgrad2d_grouped_direct",
    "implicit_convolve_sgemm",
    "precomputed_convolve_sgemm",
)
"""Kernels of cuDNN that ran five of 340 convolutions without groups, up to 20 times as slow as implicit products."""
MANY_GROUPS = 8
TURNS = (".group.", ".cores.", ".turns.")
"""Parts of families whose price expects that groups take turns (``operators/cost/turns.py``)."""
MOST_OFF = 2.5
"""Ratio of such a price and the time from which on cuDNN ran other kernels than expected."""
UNSPLIT, MOST_UNSPLIT = r"^convolution\.backward\.(pointwise|few|spatial\.first dilated)", 4.0
"""Families whose gradient of the weight cuDNN sometimes does not split by depth, which is up to 26 times as slow."""
MOST_FEW = 3
"""Input channels of a network's first convolution, for which such kernels are usual."""
LAST = [
    "small tensors",
    "quantised layers",
    "quantised weights",
    "recurrent layers",
    "recurrent layers of any width",
    "recurrent layers of usual size",
    "sampling",
    "sequence losses",
]
"""Groups that come when all others are measured, because they take longest."""
BATCH = 9
"""Cases that are profiled together, and then written."""
BATCH_SECONDS = 15.0
HELD_OUT_SHARE = 0.5
"""Held-out cases of a group for each one that is used."""


def batches(groups: Sequence[str] = (), draw: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield batches of cases of one split: one case of each group in turn, until all are drawn.

    Args:
        groups: The groups to draw from; all by default.
        draw: Names another draw of the same groups.
    """
    from trainatomy.measurement.calibration import drawn

    seeds = [f"{seed}, {draw}" if draw else seed for seed in (drawn.SEED, drawn.HELD_OUT_SEED)]
    splits = ((FIT, seeds[0], 1.0), (HELD_OUT, seeds[1], HELD_OUT_SHARE))
    chosen = [name for name in drawn.DRAWS if not groups or name in groups]
    for names in ([name for name in chosen if name not in LAST], [name for name in LAST if name in chosen]):
        waiting = {
            split: [drawn.cases(name, seed, round(drawn.DRAWS[name][1] * share)) for name in names]
            for split, seed, share in splits
        }
        yield from _in_turn(waiting)


def _in_turn(waiting: dict[str, list[Iterator[Any]]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield one case of each group in turn, two of those to be used for each one that is held out."""
    while any(waiting.values()):
        for split, turns in ((FIT, 2), (HELD_OUT, 1)):
            for _ in range(turns):
                pairs = [(found, next(found, None)) for found in waiting[split]]
                waiting[split] = [found for found, case in pairs if case is not None]
                cases = [case for _, case in pairs if case is not None]
                yield from ((split, cases[first : first + BATCH]) for first in range(0, len(cases), BATCH))


def measure(out: Path, time_limit: float, chosen: Sequence[tuple[str, list[Any]]]) -> None:
    """Measure batch after batch until the time is up, in a fork that is replaced where a batch takes too long."""
    began, log = time.monotonic(), out.with_suffix(".log")
    first = 0
    processes.preload_for_forks()
    while first < len(chosen) and time.monotonic() - began < time_limit:
        done = out.with_suffix(".done")
        done.write_text(str(first), encoding="utf-8")
        process = processes.fork_and_run(partial(_measure, chosen, first, out, done, began + time_limit), log)
        waited = time.monotonic()
        while process.status() is None and time.monotonic() - waited < BATCH_SECONDS:
            time.sleep(0.1)
            if int(done.read_text(encoding="utf-8") or first) != first:
                first, waited = int(done.read_text(encoding="utf-8")), time.monotonic()
        print(log.read_text(encoding="utf-8", errors="replace")[-2000:], flush=True)
        if process.status() is None:
            process.kill()
            names = "\n".join(str(case.make) for case in chosen[first][1])
            print(f"batch {first} took more than {BATCH_SECONDS} s and was stopped:\n{names}", flush=True)
        if process.status() != 0:
            first += 1
        else:
            return


def _measure(chosen: Sequence[tuple[str, list[Any]]], first: int, out: Path, done: Path, deadline: float) -> None:
    """Measure the batches from ``first`` on; ``done`` gets the number of the next one after each."""
    from trainatomy.measurement.calibration import calibrate

    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"environment": calibrate.environment()}) + "\n")
        for number, (split, cases) in enumerate(chosen[first:], first):
            if time.monotonic() > deadline:
                return
            points, left_out = calibrate.kernel_points(
                deadline, True, partial(print, flush=True), {split: partial(iter, cases)}
            )
            file.writelines(json.dumps({"split": split, **point}, separators=(",", ":")) + "\n" for point in points)
            file.writelines(json.dumps({"left_out": line}) + "\n" for line in left_out)
            file.flush()
            done.write_text(str(number + 1), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the points of a file; a held-out call that was also drawn to be used is left out."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    points = [line for line in lines if "call" in line]
    used = {point["call"] for point in points if point["split"] == FIT}
    return [point for point in points if point["split"] == FIT or point["call"] not in used]


def compare(points: list[dict[str, Any]], gpu_id: str, by: str, worst: int) -> None:
    """Print the errors of the predicted times by family or operator, and the calls that are furthest off."""
    models = {tf32: cost_model_of(find_gpu(gpu_id), tf32=True if tf32 else None) for tf32 in (False, True)}
    table: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for point in points:
        if point["call"].startswith(WRAPPED):
            continue
        call, model = from_text(point["call"]), models[bool(point.get("tf32"))]
        real = (point["us"] * point.get("cold_us", point["us"])) ** 0.5
        ours = kernel_cost(call, model).seconds * 1e6
        key = kernel_work(call, model.chip).family if by == "family" else call.name
        table[key].append((ours / real - 1, real, point["call"]))
    for key, found in sorted(table.items()):
        errors = [error for error, _, _ in found]
        whole = sum(real for _, real, _ in found)
        bias = sum(error * real for error, real, _ in found) / whole
        print(
            f"{key:60} {len(found):4} median {median(map(abs, errors)):6.1%} bias {bias:+7.1%}  {whole / 1e3:8.2f} ms"
        )
    every = sorted(((abs(error), error, real, call) for found in table.values() for error, real, call in found))
    print(f"\n{len(every)} calls, median {median(error for error, *_ in every):.1%}\n")
    for _, error, real, text in sorted(every, key=lambda one: -one[0] * one[2])[:worst]:
        print(f"{error:+7.1%} {real:9.1f} µs {text[:200]}")


def add(points: list[dict[str, Any]], path: Path, source: Path, only: str) -> None:
    """Add points to be used to a calibration: those of families that it has fewer than three of, or of ``ALWAYS``.

    Families that it knows well keep their points: cases of other kinds draw few shapes of theirs.  ``only`` is a
    pattern of families.  Steps of an optimizer that differ in their number alone are added once.
    """
    from trainatomy.catalog.calibrations import load
    from trainatomy.measurement.calibration.calibrate import write

    calibration = load(path)
    content = dict(calibration.content)
    kernels = content["sections"]["kernels"]
    known = {(without_step(point["call"]), point.get("tf32", False)) for point in kernels["points"]}
    chip = cost_model_of(calibration.known_gpu).chip
    counts = Counter(kernel_work(point.call, chip).family for point in calibration.points)
    new = []
    for point in points:
        point = point | {"call": to_text(with_plans(from_text(point["call"]), calibration.known_gpu))}
        family = family_of(point, chip)
        key = (without_step(point["call"]), point.get("tf32", False))
        wanted = point["split"] == FIT and not fell_back(point, chip) and key not in known
        if not wanted or family is None or not re.match(only, family):
            continue
        if counts[family] < FEWEST or family.startswith(ALWAYS):
            known.add(key)
            new.append({name: value for name, value in point.items() if name not in ("split", "names")})
    kernels["points"] += new
    lines = (json.loads(line) for line in source.read_text(encoding="utf-8").splitlines())
    measured: dict[str, Any] = next((line["environment"] for line in lines if "environment" in line), {})
    kernels["added"] = [*kernels.get("added", []), {"points": len(new), "environment": measured}]
    write(content, path)
    print(f"{len(new)} points added")


def with_plans(call: Call, gpu: Any) -> Call:
    """Return a call of a GPU with what cuDNN's library, if it is installed, says about a convolution."""
    heuristics, calls = installed_heuristics(gpu), [call]
    if heuristics is not None and not number(call, plans.ARGUMENT):
        say_plans(calls, heuristics, gpu.capability, tf32=True, deterministic=False)
    return calls[0]


def without_step(text: str) -> str:
    """Return a call as calibrations write it now, without an optimizer's step and what cuDNN's library says."""
    return re.sub(rf";(step=\d+|({ARGUMENT}|{plans.ARGUMENT})=[^;]+)", "", to_text(from_text(text)))


def fell_back(point: dict[str, Any], chip: Chip) -> bool:
    """Return whether cuDNN ran a convolution without groups, of many channels, by one of ``FALLBACKS``.

    Also where it convolved many groups one after the other, which takes a few kernels for each and up to 20 times as
    long: it does so with some shapes and not with their neighbours, so that these points say nothing about others.
    The same holds for points of ``UNSPLIT`` that took ``MOST_UNSPLIT`` times as long as their formula says.
    Families of ``TURNS`` are priced as such; of these, points that ran otherwise are left out.
    """
    if any(part in (family_of(point, chip) or "") for part in TURNS):
        ratio = kernel_work(from_text(point["call"]), chip).seconds * 1e6 / point["us"]
        return not 1 / MOST_OFF < ratio < MOST_OFF
    groups = int(found.group(1)) if (found := re.search(r";groups=(\d+)", point["call"])) else 1
    if f";{ARGUMENT}=" in point["call"]:  # the library says whether they take turns
        return False
    if groups >= MANY_GROUPS and point["kernels"] >= 2 * groups:
        return True
    if re.search(UNSPLIT, family_of(point, chip) or ""):
        physical = kernel_work(from_text(point["call"]), chip).seconds * 1e6
        if point["us"] > MOST_UNSPLIT * physical:
            return True
    dense = groups == 1 and point["call"].startswith("aten::convolution")
    if not dense or from_text(point["call"]).inputs[1].shape[1] <= MOST_FEW:
        return False
    return any(kernel in name for name in point.get("names", ()) for kernel in FALLBACKS)


def family_of(point: dict[str, Any], chip: Chip) -> str | None:
    """Return the family of a point; ``None`` for one call of Python around several products of bitsandbytes."""
    if point["call"].startswith(WRAPPED):
        return None
    try:
        return kernel_work(from_text(point["call"]), chip).family
    except (IndexError, ValueError, KeyError):
        return None


def main() -> int:
    """Measure, compare or add."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--time-limit", type=float, default=140)
    measuring.add_argument("--groups", default="", help="names of groups with commas between; all by default")
    measuring.add_argument("--draw", default="", help="the name of another draw, with seeds of its own")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--split", choices=(FIT, HELD_OUT), default=FIT)
    comparing.add_argument("--gpu", default="h200")
    comparing.add_argument("--by", choices=("family", "operator"), default="family")
    comparing.add_argument("--worst", type=int, default=20)
    adding = commands.add_parser("add")
    adding.add_argument("file", type=Path)
    adding.add_argument("calibration", type=Path)
    adding.add_argument("--only", default="", help="pattern of the families to add, as in the answer of compare")
    options = parser.parse_args()
    if options.command == "measure":
        groups = [name for name in options.groups.split(",") if name]
        measure(options.out, options.time_limit, list(batches(groups, options.draw)))
    elif options.command == "compare":
        chosen = [point for point in read(options.file) if point["split"] == options.split]
        compare(chosen, options.gpu, options.by, options.worst)
    else:
        add(read(options.file), options.calibration, options.file, options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
