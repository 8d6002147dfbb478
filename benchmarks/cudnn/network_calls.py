"""The convolutions that the networks call, and what cuDNN's heuristics answer for them by the handle of a GPU.

python benchmarks/cudnn/network_calls.py collect                              (without a GPU: cases/calls.jsonl.gz)
python benchmarks/cudnn/network_calls.py draw --out FILE [--count 6000] [--seed 5]                    (without a GPU)
python benchmarks/cudnn/network_calls.py timed --out records/timed.jsonl.gz --count 9000         (with cuDNN's library)
python benchmarks/cudnn/network_calls.py ask --out answers.jsonl [--seconds 50] [--part 0/2]             (on a GPU)

``collect`` simulates the networks and writes each distinct call once, with the networks that make it and with the
workspaces that the library and the rules predict. ``ask`` adds the plan that PyTorch takes, and then, as time allows,
the largest workspace among all plans, which ``torch.backends.cudnn.benchmark`` tries. ``draw`` draws random calls of
the kinds that networks for images make, to learn which engines are missing without a driver (``missing_engines.py``).
``timed`` lists calls of trainings that were timed on an H200: 1 x 1 gradients of weights in fp32 first, then those for
which an engine is named that is missing without a driver, then the others in fp32.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainatomy.operators.allocation import convolution
from trainatomy.operators.allocation.cudnn import backend
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.heuristics import Choice, plans

HERE = Path(__file__).parent
CALLS = HERE / "cases" / "calls.jsonl.gz"
TIMED = HERE.parent / "timing" / "records"
KINDS: tuple[Kind, Kind, Kind] = ("forward", "input gradient", "weight gradient")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
SIDES = (4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 20, 24, 26, 28, 30, 32, 35, 40, 48, 52, 56, 60, 64, 80, 112)
BATCHES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128)
LARGEST, WIDEST = 400_000, 16_384
"""Pixels of a batch; channels times rows of an image."""
sys.path.insert(0, str(HERE.parent / "everyday"))


def as_line(kind: Kind, one: Convolution) -> dict[str, Any]:
    """Return a call as plain values."""
    return {
        "kind": kind, "dtype": str(one.dtype).removeprefix("torch."),
        "data": list(one.data), "weight": list(one.weight), "output": list(one.output),
        "strides": list(one.strides), "padding": list(one.padding), "dilation": list(one.dilation),
        "groups": one.groups, "transposed": one.transposed, "last": one.channels_last,
    }  # fmt: skip


def as_convolution(line: dict[str, Any], multiprocessors: int = 132) -> Convolution:
    """Return the call of a line."""
    shapes = tuple(torch.Size(line[name]) for name in ("data", "weight", "output"))
    settings = line["strides"], line["padding"], line["dilation"]
    how = line["groups"], line["transposed"], line["last"], multiprocessors
    return Convolution(shapes[0], shapes[1], shapes[2], getattr(torch, line["dtype"]), *settings, *how)


def collect(gpu: str, version: str, folder: Path, names: str | None) -> list[dict[str, Any]]:
    """Return the distinct calls of the networks in a folder of cases; of all of them where none are named."""
    import everyday_cases

    from trainatomy.api import predict

    found: dict[str, dict[str, Any]] = {}
    plain = convolution.workspace_bytes
    for case in everyday_cases.chosen(everyday_cases.cases(folder), names, None):
        for source in ("library", "rules"):

            def noted(kind: Kind, one: Convolution, processor: Any, name: str = case.name, source: str = source) -> int:
                size, line = plain(kind, one, processor), as_line(kind, one)
                line = found.setdefault(json.dumps(line), {**line, "networks": []})
                line[source] = size
                if name not in line["networks"]:
                    line["networks"].append(name)
                return size

            convolution.workspace_bytes = noted
            try:
                predict(case.workload(gpu).replace({"software.cudnn": source, "software.torch": version}))
            finally:
                convolution.workspace_bytes = plain
        print(f"{case.name}: {len(found)} calls", flush=True)
    return list(found.values())


def draw(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield random calls: half of them 1x1 filters, some of them depthwise or in groups, one of eight channels-last."""
    chance = random.Random(seed)
    for _ in range(count):
        side = chance.choice(SIDES)
        small = [size for size in BATCHES if size * side * side <= LARGEST]
        batch, taps = chance.choice(small), chance.choice((1, 1, 1, 1, 3, 3, 3, 5, 7))
        inside, outside = (8 * chance.randint(1, 12) * chance.choice((1, 1, 2, 4, 8, 16)) for _ in range(2))
        inside, outside = min(inside, WIDEST // side), min(outside, WIDEST // side)
        form = chance.choice(("", "", "", "", "", "", "depthwise", "groups")) if taps > 1 else ""
        groups = inside if form == "depthwise" else 32 if form == "groups" else 1
        if form:
            outside = inside = 32 * math.ceil(inside / 32) if form == "groups" else inside
            groups = groups if form == "groups" else inside
        stride, padding = chance.choice((1, 1, 1, 2)), chance.choice((taps // 2, taps // 2, 0))
        after = (side + 2 * padding - taps) // stride + 1
        if after < 1:
            continue
        one = Convolution(
            torch.Size((batch, inside, side, side)), torch.Size((outside, inside // groups, taps, taps)),
            torch.Size((batch, outside, after, after)), chance.choice(TYPES), [stride] * 2, [padding] * 2, [1, 1],
            groups, False, chance.random() < 1 / 8, 132,
        )  # fmt: skip
        yield as_line(chance.choice(KINDS), one)


def timed(count: int) -> list[dict[str, Any]]:
    """Return the calls of timed trainings that are asked for first."""
    from trainatomy.catalog.calls import from_text
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.operators.allocation.cudnn.ways import convolutions_of, plan_of
    from trainatomy.simulator.cudnn import installed_heuristics

    heuristics = installed_heuristics(find_gpu("h200"))
    if heuristics is None:
        raise SystemExit("cuDNN's library is not installed")
    ranked: dict[str, tuple[int, dict[str, Any]]] = {}
    for file in (*sorted(TIMED.glob("*calls-h200*.gz")), TIMED / "network-convolutions-h200.jsonl.gz"):
        with gzip.open(file, "rt", encoding="utf-8") as recorded:
            texts = [text for line in recorded if (text := json.loads(line).get("call"))]
        for kind, one in (each for text in texts for each in convolutions_of(from_text(text))):
            line = as_line(kind, one)
            plan = (
                None
                if (key := json.dumps(line)) in ranked
                else heuristics.plan(kind, one, tf32=True, deterministic=False)
            )
            if plan is not None:
                is_missing, is_fp32 = plan_of(kind, one, plan).engine < 0, one.dtype == torch.float32
                is_first = is_fp32 and kind == "weight gradient" and line["weight"][2:] == [1, 1]
                ranked[key] = (0 if is_first else 1 + (not is_fp32) if is_missing else 3 if is_fp32 else 4, line)
    return [line for _, line in sorted(ranked.values(), key=lambda each: each[0])[:count]]


def ask(seconds: float, library: Path | None, calls: Path, part: str, passes: Sequence[bool]) -> Any:
    """Yield the lines of the calls with the plan that PyTorch takes, then with the largest workspace of all plans."""
    from probe import library as loaded
    from probe import properties

    begin = time.monotonic()
    torch.zeros(1, device="cuda")
    cudnn = backend.Backend(library or loaded())
    handle = cudnn.handle()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": cudnn.version}
    yield about | {"properties": properties(cudnn, handle)}
    with gzip.open(calls, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    first, parts = map(int, part.split("/"))
    for every in passes:
        for number, line in list(enumerate(lines))[first::parts]:
            if time.monotonic() - begin > seconds:
                return
            call = as_convolution(line)
            try:
                offered = plans(line["kind"], call, cudnn, handle, Choice())
                if every:
                    yield {"number": number, "all": [[plan.engine, plan.workspace] for plan in offered]}
                else:
                    plan = next(offered)
                    yield {"number": number, "engine": plan.engine, "knobs": plan.knobs, "workspace": plan.workspace}
            except (backend.BackendError, StopIteration) as error:
                yield {"number": number, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("collect", "draw", "timed", "ask"))
    parser.add_argument("--cases", type=Path, default=HERE / "cases", help="folder of cases to collect from")
    parser.add_argument("--names", help="those cases alone, separated by commas")
    parser.add_argument("--calls", type=Path, default=CALLS, help="the calls that are asked for")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--torch", default="2.11.0", help="version of PyTorch on the GPU's machine")
    parser.add_argument("--out", type=Path, default=CALLS)
    parser.add_argument("--library", type=Path, help="the file of cuDNN (default: the one that PyTorch loads)")
    parser.add_argument("--seconds", type=float, default=50, help="after which nothing is asked (default: 50)")
    parser.add_argument("--part", default="0/1", help="ask for one part of the calls, 0/2 is the first of two")
    parser.add_argument("--first", action="store_true", help="leave out the largest workspaces")
    parser.add_argument("--count", type=int, default=6000, help="calls to draw or list (default: 6000)")
    parser.add_argument("--seed", type=int, default=5, help="of the drawn calls")
    options = parser.parse_args()
    opened = gzip.open if options.out.suffix == ".gz" else open
    if options.what == "collect":
        lines: Iterable[dict[str, Any]] = collect(options.gpu, options.torch, options.cases, options.names)
    elif options.what == "draw":
        lines = draw(options.count, options.seed)
    elif options.what == "timed":
        lines = timed(options.count)
    else:
        lines = ask(
            options.seconds, options.library, options.calls, options.part, (False,) if options.first else (False, True)
        )
    with opened(options.out, "wt", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
