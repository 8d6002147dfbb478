"""Measure recurrent layers of random shapes, and compare the prices of their kernels.

python benchmarks/timing/recurrent_layers.py measure --out FILE [--time-limit 90]   # on a GPU
python benchmarks/timing/recurrent_layers.py compare FILE [--gpu h200] [--worst 10]  # anywhere

A line for each network: the kernels of each pass with their blocks and time (a profiler that records the GPU alone),
how many run at a time, and the CPU's time to launch them (no profiler, medians).  Older records have no blocks, and
both passes together instead of backward.  Kernels of PyTorch's own around the layers (zeros, and weights that are put
together) are left out of the comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import processes  # noqa: E402
import trainings  # noqa: E402

from trainatomy.results.operations import Array, Call  # noqa: E402

GROUPS = {"recurrent layers of any width": 110, "recurrent layers": 60, "recurrent layers of usual size": 50}
WIDE = "wide recurrent layers"
"""A group that is drawn here: every other case is held out."""
RUNS, TIMED = 2, 5
GRACE = 15
"""Seconds beyond its limit after which the process that measures is killed."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of events that are work of the GPU."""
AROUND = ("void at::native", "at::cuda", "Memcpy")
"""Beginnings of the names of kernels that are not cuDNN's."""
TRAINED = "recurrent layers as in trainings"
"""A group that is drawn here, with the sizes of drawn trainings: every other case is held out."""
SHORT = "short recurrent layers as in trainings"
"""The same for shorter sequences, of which more are measured in the same time."""
LENGTHS = {TRAINED: (35, 70, 120, 120, 200), SHORT: (24, 32, 48)}
CYCLES_PER_US, WAITING = 2000, 3
"""Cycles of a GPU in a microsecond; for so many times the CPU's time the GPU waits, so that all kernels are queued."""
PRECISIONS = (
    ("float32", True),
    ("float32", True),
    ("float32", False),
    ("float16", True),
    ("float16", True),
    ("bfloat16", True),
)
"""Types of numbers of wide layers, and whether fp32 is multiplied as TF32."""
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Kernels = dict[str, list[float]]


def measure(out: Path, time_limit: float, groups: dict[str, int], draw: str) -> None:
    """Measure case after case of the groups in a fork until the time is up; ``draw`` names another draw of them."""
    processes.preload_for_forks()
    began, log = time.monotonic(), out.with_suffix(".log")
    process = processes.fork_and_run(partial(_measure, out, began + time_limit, groups, draw), log)
    while process.status() is None and time.monotonic() - began < time_limit + GRACE:
        time.sleep(0.1)
    if process.status() is None:
        process.kill()
    print(log.read_text(encoding="utf-8", errors="replace")[-3000:], flush=True)


def _measure(out: Path, deadline: float, groups: dict[str, int], draw: str) -> None:
    from trainatomy.measurement.calibration import drawn

    seed = f"{drawn.SEED}, {draw}" if draw else drawn.SEED
    for group, count in groups.items():
        if group in LENGTHS:
            cases = trained_networks(seed, count, group)
        else:
            cases = wide_networks(seed, count) if group == WIDE else _drawn_networks(group, seed, count)
        for number, case in enumerate(cases):
            if time.monotonic() > deadline:
                return
            line = {"group": group, "case": number, **case}
            try:
                line |= _measured(case)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _drawn_networks(group: str, seed: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the networks of a group of the calibration's draws."""
    from trainatomy.measurement.calibration import drawn

    for case in drawn.cases(group, seed, count):
        kind, sizes, shape, dtype, options = case.make.args  # type: ignore[attr-defined]
        found = {"kind": kind.__name__, "sizes": sizes, "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
        yield {**found, **options}


def wide_networks(seed: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield networks of wide layers, whose products wait for each other; every other one is held out."""
    random = Random(f"{seed}/{WIDE}")
    for number in range(count):
        step = random.choice((1, 2, 4, 8, 32, 64, 128))
        inputs, hidden = (random.randint(least, most) // step * step for least, most in ((128, 1024), (256, 1536)))
        dtype, tf32 = random.choice(PRECISIONS)
        yield {
            "split": ("fit", "held out")[number % 2],
            "kind": random.choice(("LSTM", "LSTM", "LSTM", "GRU", "GRU", "RNN")),
            "sizes": (random.choice((inputs, hidden)), hidden),
            "shape": (random.randint(8, 160), random.randint(16, 48)),
            "dtype": dtype,
            "tf32": tf32,
            "num_layers": random.choice((1, 2, 3, 4)),
            "bidirectional": random.random() < 0.3,
        }


def trained_networks(seed: str, count: int, group: str = TRAINED) -> Iterator[dict[str, Any]]:
    """Yield networks with the sizes of drawn trainings (autocast computes in fp16); every other one is held out."""
    random = Random(f"{seed}/{group}")
    for number in range(count):
        hidden = random.randrange(192, 1281, random.choice((2, 2, 4, 8, 64)))
        yield {
            "split": ("fit", "held out")[number % 2],
            "kind": random.choice(("LSTM", "LSTM", "GRU", "GRU", "RNN")),
            "sizes": (random.choice((random.randrange(128, 769, 32), hidden)), hidden),
            "shape": (random.randint(16, 96), random.choice(LENGTHS[group])),
            "dtype": random.choice(("float32", "float16")),
            "tf32": True,
            "num_layers": random.choice((1, 2, 3, 4)),
            "bidirectional": random.random() < 1 / 3,
        }


def _measured(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    kind, dtype = getattr(torch.nn, case["kind"]), getattr(torch, case["dtype"])
    sizes, shape = case["sizes"], case["shape"]
    options = {name: case[name] for name in ("num_layers", "bidirectional", "dropout") if name in case}
    torch.backends.cudnn.allow_tf32 = case.get("tf32", True)
    network = kind(*sizes, batch_first=True, device="cuda", dtype=dtype, **options)
    network.flatten_parameters()
    data = torch.randn(*shape, sizes[0], device="cuda", dtype=dtype).requires_grad_()
    gradient = torch.randn_like(network(data)[0])
    wanted = [data, *network.parameters()]

    def backward(result: Any) -> None:
        torch.autograd.grad(result, wanted, gradient)

    backward(network(data)[0])
    cpu = []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = network(data)[0]
        between = time.perf_counter()
        torch.cuda.synchronize()
        again = time.perf_counter()
        backward(result)
        cpu.append((between - began, time.perf_counter() - again))
    host = [median(each) * 1e6 for each in zip(*cpu, strict=True)]
    found: dict[str, Any] = {"cpu_us": [round(each, 1) for each in host]}
    for queued in (False, True):
        waits = [WAITING * each if queued else 0.0 for each in host]
        results = [network(data)[0] for _ in range(RUNS)]
        forward, beside_forward = _kernels(lambda: network(data)[0], waits[0])
        back, beside_back = _kernels(partial(lambda results: backward(results.pop()), results), waits[1])
        passes = {"forward": forward, "backward": back, "at_once": {"forward": beside_forward, "backward": beside_back}}
        found |= {"queued": passes} if queued else passes
    return found


def _kernels(work: Callable[[], object], waits_us: float) -> tuple[Kernels, list[float]]:
    """Return the runs and microseconds of each kernel in one run of the work, and how many run at a time.

    The name of a kernel ends with its blocks.  Kernels at a time: their mean while one of cuDNN's runs, and streams.
    The GPU waits before each run, so that the kernels are queued when the first one begins, as behind other work.
    """
    import torch

    from trainatomy.measurement.profiler.calls import read_trace

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(RUNS):
            if waits_us:
                torch.cuda._sleep(int(waits_us * CYCLES_PER_US))
            work()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = [event for event in read_trace(Path(folder, "trace.json")) if event.get("cat") in ON_GPU]
    runs: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in events:
        blocks = event["args"].get("grid")
        name = event["name"][:90] + (f" {blocks}" if blocks else "")
        runs[name] += 1
        times[name] += event["dur"]
    return {name: [runs[name] / RUNS, round(times[name] / RUNS, 2)] for name in runs}, _at_once(events)


def _at_once(events: Sequence[dict[str, Any]]) -> list[float]:
    own = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if not event["name"].startswith(AROUND))
    covered, until = 0.0, 0.0
    for began, ended in own:
        covered += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    streams = {event["args"].get("stream") for event in events}
    return [round(sum(ended - began for began, ended in own) / max(covered, 1e-9), 3), len(streams)]


def calls(line: dict[str, Any]) -> tuple[Call, Call]:
    """Return the calls of forward and backward, as a simulation records them."""
    (inputs, hidden), (batch, steps) = line["sizes"], line["shape"]
    layers, directions = line["num_layers"], 2 if line["bidirectional"] else 1
    array = partial(_array, line["dtype"])
    gates = GATES[line["kind"]] * hidden
    weights = []
    for layer in range(layers):
        width = inputs if layer == 0 else hidden * directions
        weights += [array(gates, width), array(gates, hidden), array(gates), array(gates)] * directions
    data, output = array(steps, batch, inputs), array(steps, batch, hidden * directions)
    states = [array(layers * directions, batch, hidden)] * (2 if line["kind"] == "LSTM" else 1)
    numbers = (("mode", line["kind"]), ("num_layers", str(layers)), ("bidirectional", str(line["bidirectional"])))

    def call(name: str, given: tuple[Array, ...], made: tuple[Array, ...]) -> Call:
        return Call(f"aten::{name}", (*given, *states, *weights), (*made, *states), (), numbers, None, (), False)

    return call("_cudnn_rnn", (data,), (output,)), call("_cudnn_rnn_backward", (output, data), (data,))


def _array(dtype: str, *shape: int) -> Array:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return Array(shape, tuple(strides), dtype, BYTES[dtype], 0, False)


def measured(line: dict[str, Any]) -> tuple[Kernels, Kernels]:
    """Return cuDNN's kernels in forward and in backward."""
    forward, second = (
        {name: found for name, found in line[part].items() if not name.startswith(AROUND)}
        for part in ("forward", "backward" if "backward" in line else "both")
    )
    if "backward" in line:
        return forward, second
    rest = {
        name: [a - b for a, b in zip(found, forward.get(name, [0, 0]), strict=True)] for name, found in second.items()
    }
    return forward, {name: found for name, found in rest.items() if found[0] > 1 / RUNS / 2}


def kind_of(line: dict[str, Any], kernels: Kernels) -> str:
    """Return how a pass was computed: fused, or step by step by the alignment of its rows."""
    if any("Persist" in name for name in kernels):
        fused = "fused" if any("blockPersist" in name for name in kernels) else "persistent"
        return f"{fused} {line['dtype']}"
    if not line.get("tf32", True):
        return "float32 without TF32"
    inputs, hidden = (size * BYTES[line["dtype"]] % 16 for size in line["sizes"])
    return f"{line['dtype']}{' hidden misaligned' if hidden else ' inputs misaligned' if inputs else ''}"


def compare(path: Path, gpu_id: str, worst: int) -> None:
    """Print the errors of predicted times and numbers of kernels by kind and pass."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.timing.cost_model import cost_model_of, kernel_cost

    models = {tf32: cost_model_of(find_gpu(gpu_id), tf32=None if tf32 else False) for tf32 in (True, False)}
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for line in trainings.lines(path):
        for call, kernels, part in zip(calls(line), measured(line), ("forward", "backward"), strict=True):
            runs, us = (sum(column) for column in zip(*kernels.values(), strict=True))
            cost = kernel_cost(call, models[line.get("tf32", True)])
            about = f"{line['kind']} {line['sizes']} {line['shape']} {line['num_layers']} {line['bidirectional']}"
            errors = cost.seconds * 1e6 / us - 1, cost.launches / runs - 1
            found[f"{kind_of(line, kernels)}, {part}"].append((*errors, f"{about} {us:.0f} µs"))
    for name, lines in sorted(found.items()):
        times, numbers, _ = zip(*lines, strict=True)
        off = median(map(abs, times))
        print(f"{name:38} {len(lines):3} mean {median(times):+6.1%} off {off:6.1%} kernels {median(numbers):+6.1%}")
        for error, _, about in sorted(lines, key=lambda one: -abs(one[0]))[:worst]:
            print(f"      {error:+7.1%} {about}")


def main() -> int:
    """Measure or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--time-limit", type=float, default=90)
    measuring.add_argument("--groups", default="", help="names of groups with commas between; all by default")
    measuring.add_argument("--draw", default="", help="the name of another draw, with seeds of its own")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--gpu", default="h200")
    comparing.add_argument("--worst", type=int, default=0)
    options = parser.parse_args()
    if options.command == "measure":
        names = options.groups.split(",") if options.groups else list(GROUPS)
        chosen = {
            name: count for name, count in {**GROUPS, WIDE: 400, TRAINED: 400, SHORT: 400}.items() if name in names
        }
        measure(options.out, options.time_limit, chosen, options.draw)
    else:
        compare(options.file, options.gpu, options.worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
