"""Measure what the CPU takes to launch recurrent networks of random shapes, and fit its costs (``catalog/hosts.yaml``).

python benchmarks/timing/recurrent_launches.py measure --out FILE.jsonl [--time-limit 20]   # on a GPU
python benchmarks/timing/recurrent_launches.py fit [--folds 3]                               # anywhere: all records

The networks are so small that the GPU waits for the CPU.  A line for each: microseconds of the forward pass, until the
GPU is done, of the backward pass, and until it is done again; and readings of the probe of the host's pace before and
after each time.  The first records also count the calls of the CUDA runtime.  The fit also takes steps of trainings
with such networks that the CPU bounds, and prints the errors of families that were left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy
from scipy.optimize import least_squares

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import host_drawn  # noqa: E402
import recurrent_layers  # noqa: E402
import trainings  # noqa: E402
from host_observations import COSTS, GPUS, HOST, RECURRENT, bound_steps, simulated_step, whole  # noqa: E402
from host_refit import fold_of  # noqa: E402

from trainatomy.measurement.device.host_probe import PROBE  # noqa: E402
from trainatomy.operators.cost import recurrence  # noqa: E402

SEED = "host recurrent 1"
PRECISIONS = (("float32", False), ("float32", False), ("float32", True), ("float16", True), ("bfloat16", True))
TIMES, READINGS = 5, 2
FAMILIES = frozenset({"lstm", "lstm-both", "gru", "rnn", "wide-lstm", "both-gru", "recurrent"})
PASSES = {"forward": "graph", "backward": "backward"}
ENGINE = 120.0
"""Microseconds of autograd's engine, which ``backward_pass`` has in a training."""
COUNTS = ("network", "layer", "kernel", "step", "follower", "part", "misaligned")
"""What is counted; a misaligned step takes less than another."""
FIRST = {"forward": (250.0, 20.0, 2.0, 7.0, 1.0, 10.0, 1.0), "backward": (200.0, 160.0, 3.0, 8.0, 1.0, 10.0, 1.0)}
DEVIATION, PULL, POWER = 0.12, 0.12, 0.8
"""Of logarithms; pull of the costs and of the power of the pace towards where the fit begins."""
STEPS_WEIGHT = 1.5


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield networks without end."""
    draw, number = Random(SEED), 0
    while True:
        dtype, tf32 = draw.choice(PRECISIONS)
        kind, hidden = (
            draw.choice(("LSTM", "LSTM", "GRU", "RNN")),
            draw.randrange(208, 705, draw.choice((2, 8, 16, 64))),
        )
        case = {"kind": kind, "hidden": hidden, "inputs": draw.choice((hidden, draw.randrange(64, 513, 32)))}
        case |= {"batch": draw.choice((8, 16, 32, 64)), "steps": draw.choice((16, 32, 48, 70, 100, 160))}
        case |= {"dtype": dtype, "tf32": tf32, "layers": draw.choice((1, 1, 2, 3, 4)), "both": draw.random() < 0.45}
        yield str(number), case
        number += 1


def measured(case: Mapping[str, Any]) -> dict[str, Any]:
    """Time both passes of a network."""
    import torch

    torch.backends.cudnn.allow_tf32 = case["tf32"]
    dtype = getattr(torch, case["dtype"])
    options = {"num_layers": case["layers"], "bidirectional": case["both"], "dtype": dtype}
    network = getattr(torch.nn, case["kind"])(
        case["inputs"], case["hidden"], batch_first=True, device="cuda", **options
    )
    network.flatten_parameters()
    shape = (case["batch"], case["steps"], case["inputs"])
    data = torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
    gradient, wanted = torch.randn_like(network(data)[0]), [data, *network.parameters()]
    rows, readings = [], [_readings()]
    for _ in range(TIMES):
        torch.cuda.synchronize()
        moments = [time.perf_counter()]
        result = network(data)[0]
        moments.append(time.perf_counter())
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        torch.autograd.grad(result, wanted, gradient)
        moments.append(time.perf_counter())
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        rows.append([round(1e6 * (after - before), 1) for before, after in pairwise(moments)])
        readings.append(_readings())
    return {**case, "rows": rows, "readings": readings}


def _readings() -> list[tuple[float, float]]:
    import torch

    from trainatomy.measurement.device import host_probe

    found = []
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(READINGS):
            host_probe._work()
            began = time.perf_counter()
            host_probe._work()
            main = time.perf_counter() - began
            found.append((round(1e6 * main, 1), round(1e6 * host_probe._visit()[0], 1)))
    return found


def counts_of(call: Any) -> list[float]:
    """Return how often each of ``COUNTS`` occurs in a pass."""
    inside = recurrence.launches(call), *recurrence.launched_steps(call), recurrence.launched_parts(call)
    return [1.0, recurrence.layers(call), *inside, -recurrence.misaligned_steps(call)]


def networks() -> Iterator[dict[str, Any]]:
    """Yield both passes of the measured networks; without forward passes in bf16, whose weights are copied first."""
    for gpu in GPUS:
        for line in trainings.lines(HERE / "records" / f"recurrent-launches-{gpu}.jsonl.gz"):
            as_layers = {"sizes": (line["inputs"], line["hidden"]), "shape": (line["batch"], line["steps"])}
            as_layers |= {"num_layers": line["layers"], "bidirectional": line["both"]}
            calls = recurrent_layers.calls({**line, **as_layers})
            rows = numpy.median(numpy.array(line["rows"][1:]), 0)
            for place, (name, call) in enumerate(zip(PASSES, calls, strict=True)):
                if not recurrence.launched_steps(call)[0] or (line["dtype"], name) == ("bfloat16", "forward"):
                    continue
                pace = _pace([both[place] for each in line["readings"][1:] for both in each], place)
                rest = ENGINE * place
                yield {"us": rows[2 * place], "pace": pace, "rest": rest, "counts": {name: counts_of(call)}}


def _pace(readings: Sequence[float], place: int) -> float:
    ordered, share = sorted(readings), HOST.backward_probe_shares[PROBE]
    left_out = len(ordered) // 5
    us = HOST.probe_seconds[PROBE] * 1e6 * (share if place else 1 - share)
    return float((fmean(ordered[left_out:-left_out]) / us) ** HOST.pace_exponents[PROBE])


def steps() -> Iterator[dict[str, Any]]:
    """Yield the steps of trainings with recurrent networks that the CPU bounds."""
    rows, known = {row.name: row for row in trainings.rows() if row.family in FAMILIES}, dict[str, Any]()
    for gpu in GPUS:
        for _, line, pace in bound_steps(gpu):
            if (row := rows.get(line["name"])) is None:
                continue
            if row.name not in known:
                operations, parts = simulated_step(row)
                calls = [operations.calls[one.call] for one in operations.operations]
                inside = {
                    name: counts_of(call)
                    for call in calls
                    if "_cudnn_rnn" in call.name
                    for name in ("backward" if call.name.endswith("backward") else "forward",)
                }
                own = sum(
                    COSTS[context]["recurrent"] + COSTS["recurrent_layer"][context] * inside[name][1]
                    for name, context in PASSES.items()
                )
                all_parts = whole(parts)
                known[row.name] = inside, sum(all_parts.values()) - all_parts[RECURRENT] - own
            counts, rest = known[row.name]
            about = {"family": row.family, "weight": STEPS_WEIGHT}
            yield {**about, "us": line["step_seconds"] * 1e6, "pace": pace, "rest": rest, "counts": counts}


def predicted(one: Mapping[str, Any], costs: Mapping[str, Any], power: float) -> float:
    """Return the microseconds of an observation; the costs are in the order of ``COUNTS``."""
    found = one["rest"] * one["pace"]
    for name, counts in one["counts"].items():
        outside, inside = (numpy.dot(counts[part], costs[name][part]) for part in (slice(2), slice(2, None)))
        found += outside * one["pace"] + inside * one["pace"] ** power
    return float(found)


def fit(observations: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], float]:
    """Return the costs of each pass and the power of the pace."""
    first = numpy.log(numpy.concatenate([FIRST[name] for name in PASSES]))

    def costs_of(values: Any) -> dict[str, Any]:
        return dict(zip(PASSES, numpy.exp(values[:-1]).reshape(2, -1), strict=True))

    def errors(values: Any) -> Any:
        costs = costs_of(values)
        found = [
            one.get("weight", 1.0) * numpy.log(predicted(one, costs, values[-1]) / one["us"]) for one in observations
        ]
        return numpy.array([*found, *(PULL * (values[:-1] - first)), 2 * PULL * (values[-1] - POWER)])

    values = least_squares(errors, [*first, POWER], loss="soft_l1", f_scale=DEVIATION).x
    return costs_of(values), float(values[-1])


def main() -> int:
    """Measure or fit."""
    if sys.argv[1:2] == ["measure"]:
        del sys.argv[1]
        return host_drawn.measure_in_fork(__doc__, cases(), measured, seconds=20)
    folds = int(sys.argv[sys.argv.index("--folds") + 1]) if "--folds" in sys.argv else 3
    alone, trained = list(networks()), list(steps())
    errors: list[float] = []
    for fold in range(folds):
        costs, power = fit([*alone, *(one for one in trained if fold_of(one["family"], folds) != fold)])
        left_out = [one for one in trained if fold_of(one["family"], folds) == fold]
        errors += [predicted(one, costs, power) / one["us"] - 1 for one in left_out]
    off = sorted(map(abs, errors))
    print(f"{len(off)} steps of families that were left out: {off[len(off) // 2]:.1%}, worst {off[-1]:.1%}")
    costs, power = fit([*alone, *trained])
    for name, values in costs.items():
        print(name, ", ".join(f"{count} {value:.2f}" for count, value in zip(COUNTS, values, strict=True)))
    print(f"{len(alone)} passes and {len(trained)} steps; power of the pace {power:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
