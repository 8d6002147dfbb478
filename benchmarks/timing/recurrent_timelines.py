"""Measure on a GPU what each kernel of a recurrent network is for, how long it takes and how many run beside it.

python benchmarks/timing/recurrent_timelines.py --out FILE [--limit 65] [--begin 71] [--groups misaligned,usual]
python benchmarks/timing/recurrent_timelines.py --out FILE --between   # usual networks at batches that are never drawn

A line for each drawn network: its passes in the second of two steps of a small training, and the same passes behind
work that the GPU has first.  For each role of a kernel, and each layer and direction where they are told apart: how
many kernels there are, their mean time in microseconds, and the mean number of kernels that run meanwhile, themselves
included.  Between them are lines of single layers with six steps, whose products run alone.  The pace of the host is
probed beside each network.  ``recurrent_points.py`` makes prices of the lines; every other case is held out there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, product
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from drawn_trainings import FACTORS, PRECISIONS, sets
from recurrent_roles import Run, summary

USUAL = (
    ("LSTM", 650, 650, 2, False, 70, 80),
    ("LSTM", 320, 800, 3, False, 120, 48),
    ("GRU", 256, 768, 3, False, 70, 64),
    ("GRU", 256, 384, 2, True, 120, 48),
    ("LSTM", 200, 256, 1, True, 256, 48),
    ("RNN", 128, 512, 2, False, 256, 64),
)
"""Networks of ``trainings.yaml``: kind, inputs, hidden, layers, both directions, steps and usual batch."""
DRAWN = {
    ("LSTM", 650): "lstm", ("LSTM", 800): "wide-lstm", ("GRU", 768): "gru", ("RNN", 512): "rnn",
    ("LSTM", 256): "lstm-both",
}  # fmt: skip
"""Kind and hidden numbers of those that are drawn, and their names in ``drawn_trainings.yaml``."""
BETWEEN = (0.44, 0.55, 0.68, 0.83, 0.95, 1.05, 1.18, 1.32, 1.45, 1.6)
"""Multiples of the batch there, between those that are drawn."""
FIRST_BETWEEN = 1000
"""Number of the first such case."""
GROUPS = ("drawn", "drawn", "drawn", "misaligned", "large", "usual")
ENTRIES, BATCH, SHORT_STEPS, SHORT_AT_ONCE, SHORT_PER_NETWORK = 4000, 48, 6, 30, 5
PASSES = ("forward", "backward", "queued forward", "queued backward")
PLACES = (5, 7, 9, 11)
"""Where the passes lie between the marks: those of the second step, then those behind other work."""
MARKED = 13
CYCLES_PER_SECOND, WAITING, LONGEST_WAIT = 1.8e9, 3, 0.05


def networks() -> Iterator[dict[str, Any]]:
    """Draw networks: as drawn trainings have them, with misaligned or large widths, and those of usual trainings."""
    random = Random("recurrent timelines 1")
    for number in count():
        group = random.choice(GROUPS)
        kind = random.choice(("LSTM", "LSTM", "GRU", "GRU", "RNN"))
        inputs = random.randrange(128, 769, 32)
        hidden = random.randrange(384, 1281, random.choice((2, 4, 8, 64)))
        layers, both = random.choice((1, 2, 3, 4)), random.random() < 1 / 3
        steps, batch = random.choice((120, 120, 80, 48)), round(BATCH * random.choice(FACTORS))
        precision = random.choice(PRECISIONS)
        if group == "misaligned":
            kind, hidden = random.choice(("LSTM", "GRU")), 2 * random.randrange(193, 640, 2)
            hidden += random.choice((0, 0, 2))
        elif group == "large":
            kind, hidden = random.choice(("LSTM", "GRU")), random.randrange(640, 1281, random.choice((4, 20)))
        elif group == "usual":
            kind, inputs, hidden, layers, both, steps, usual = random.choice(USUAL)
            batch = round(usual * random.choice(FACTORS))
        found = {"case": number, "group": group, "kind": kind, "sizes": [inputs, hidden], "shape": [batch, steps]}
        yield {**found, "layers": layers, "both": both, "precision": precision}


def between() -> Iterator[dict[str, Any]]:
    """Return usual networks at batches between those that are drawn."""
    drawn = {name: row["batch"] for family in sets()["usual"].values() for name, row in family.items()}
    usual = [one for one in USUAL if (one[0], one[2]) in DRAWN]
    cases = product(BETWEEN, usual, ("tf32", "fp16", "bf16"))
    for number, (factor, network, precision) in enumerate(cases, FIRST_BETWEEN):
        kind, inputs, hidden, layers, both, steps, _ = network
        found = {"case": number, "group": "between", "kind": kind, "sizes": [inputs, hidden]}
        found |= {"shape": [round(drawn[DRAWN[kind, hidden]] * factor), steps], "layers": layers}
        yield {**found, "both": both, "precision": precision}


def short_layers() -> Iterator[dict[str, Any]]:
    """Draw single layers."""
    random = Random("recurrent kernels 1")
    for number in count():
        kind = random.choice(("LSTM", "LSTM", "GRU", "GRU", "RNN"))
        hidden = random.randrange(200, 1281, random.choice((2, 2, 4, 4, 8, 8, 64)))
        batch = random.choice((24, 36, 48, 60, 72, random.randint(8, 128)))
        dtype = random.choice(("float16", "float16", "float32", "float32", "bfloat16"))
        yield {"case": number, "kind": kind, "hidden": hidden, "batch": batch, "dtype": dtype}


def _traced(work: Callable[[], None]) -> list[list[Run]]:
    """Return the runs of kernels between the marks that the work makes."""
    import torch

    from trainatomy.measurement.profiler.calls import read_trace

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = read_trace(Path(folder, "trace.json"))
    launched = {
        e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    runs = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memset", "gpu_memcpy"):
            continue
        args, blocks = event["args"], event["args"].get("grid")
        name = event["name"][:110] + (f" {blocks}" if blocks else "")
        at = launched.get(args.get("correlation"), event["ts"])
        runs.append(Run(float(at), float(event["ts"]), float(event["dur"]), args.get("stream", -1), name))
    parts: list[list[Run]] = [[]]
    for run in sorted(runs):
        if "spin_kernel" in run.name:
            parts.append([])
        else:
            parts[-1].append(run)
    return parts


def _network(case: dict[str, Any]) -> Any:
    """Return a network for texts that marks the beginning and the end of its recurrent layers in both passes."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            torch.cuda._sleep(1)
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            torch.cuda._sleep(1)
            return gradients[0]

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inputs, hidden = case["sizes"]
            options = {"num_layers": case["layers"], "bidirectional": case["both"], "batch_first": True}
            self.embedding = nn.Embedding(ENTRIES, inputs)
            self.network = getattr(nn, case["kind"])(inputs, hidden, **options)
            self.head = nn.Linear(hidden * (1 + case["both"]), ENTRIES)

        def forward(self, tokens: Any, labels: Any) -> Any:
            results = Mark.apply(self.network(Mark.apply(self.embedding(tokens)))[0])
            return F.cross_entropy(self.head(results).flatten(0, 1), labels.flatten())

    with torch.device("cuda"):
        return Marked()


def measured_network(case: dict[str, Any]) -> dict[str, Any]:
    """Run the network on the GPU and return its line."""
    import torch

    from trainatomy.measurement.device.host_probe import probe_seconds

    torch.backends.cuda.matmul.allow_tf32 = case["precision"] == "tf32"
    amp = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case["precision"])
    torch.manual_seed(0)
    model = _network(case)
    tokens, labels = (torch.randint(0, ENTRIES, tuple(case["shape"]), device="cuda") for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(*case["shape"], case["sizes"][0], device="cuda").requires_grad_()
    wanted = [data, *model.network.parameters()]

    def step() -> None:
        with torch.autocast("cuda", amp, enabled=amp is not None):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def forward() -> Any:
        with torch.autocast("cuda", amp, enabled=amp is not None):
            return model.network(data)[0]

    for _ in range(2):
        step()
    gradient = torch.randn_like(forward())
    torch.autograd.grad(forward(), wanted, gradient)
    cpu, pace = [], []
    for _ in range(3):
        pace.append(probe_seconds())
        torch.cuda.synchronize()
        times = [time.perf_counter()]
        result = forward()
        times.append(time.perf_counter())
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        torch.autograd.grad(result, wanted, gradient)
        times.append(time.perf_counter())
        cpu.append((times[1] - times[0], times[3] - times[2]))
    host = [median(each) for each in zip(*cpu, strict=True)]

    def wait_for(seconds: float) -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(int(min(WAITING * seconds, LONGEST_WAIT) * CYCLES_PER_SECOND))

    def work() -> None:
        step()
        step()
        wait_for(host[0])
        result = forward()
        torch.cuda._sleep(1)
        wait_for(host[1])
        torch.autograd.grad(result, wanted, gradient)
        torch.cuda._sleep(1)

    parts = _traced(work)
    pace += [probe_seconds(), probe_seconds()]
    numbers = {"cpu_us": [round(each * 1e6, 1) for each in host], "pace_us": [round(each * 1e6, 2) for each in pace]}
    if len(parts) != MARKED:
        return {**case, **numbers, "error": f"{len(parts)} parts"}
    passes = zip(PASSES, PLACES, strict=True)
    found = {name: summary(parts[place], backward=name.endswith("backward")) for name, place in passes}
    return {**case, **numbers, "passes": found}


def measured_layers(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run single layers and return their lines: for each pass the time of a step's product and of its gates."""
    import torch
    from torch import nn

    made = []
    for case in cases:
        options = {"batch_first": True, "device": "cuda", "dtype": getattr(torch, case["dtype"])}
        layer = getattr(nn, case["kind"])(256, case["hidden"], **options)
        data = torch.randn(case["batch"], SHORT_STEPS, 256, device="cuda", dtype=options["dtype"]).requires_grad_()
        gradient = torch.randn_like(layer(data)[0])
        torch.autograd.grad(layer(data)[0], [data, *layer.parameters()], gradient)
        made.append((layer, data, gradient))

    def work() -> None:
        for layer, data, gradient in made:
            torch.cuda._sleep(1)
            result = layer(data)[0]
            torch.cuda._sleep(1)
            torch.autograd.grad(result, [data, *layer.parameters()], gradient)

    parts = _traced(work)[1:]
    lines = []
    for number, case in enumerate(cases):
        own = zip(("forward", "backward"), parts[2 * number : 2 * number + 2], strict=True)
        lines.append({**case, "passes": {name: summary(runs, backward=name == "backward") for name, runs in own}})
    return lines


def _append(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def main() -> int:
    """Measure until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=65, help="seconds")
    parser.add_argument("--begin", type=int, default=0, help="the first case: those before it were measured already")
    parser.add_argument("--groups", default=",".join(GROUPS), help="only networks of these groups")
    parser.add_argument("--between", action="store_true", help="usual networks at batches that are never drawn")
    options = parser.parse_args()
    began, done, short_done = time.monotonic(), 0, 0
    if options.between:
        for case in between():
            if time.monotonic() - began < options.limit:
                _append(options.out, [{"part": "network", **measured_network(case)}])
        return 0
    full = (case for case in islice(networks(), options.begin, None) if case["group"] in options.groups.split(","))
    short = islice(short_layers(), SHORT_PER_NETWORK * options.begin, None)
    while time.monotonic() - began < options.limit:
        if done >= short_done / SHORT_PER_NETWORK:
            lines = [{"part": "layer", **line} for line in measured_layers([next(short) for _ in range(SHORT_AT_ONCE)])]
            short_done += SHORT_AT_ONCE
        else:
            lines = [{"part": "network", **measured_network(next(full))}]
            done += 1
        _append(options.out, lines)
        print(f"{time.monotonic() - began:.1f} s: {done} networks, {short_done} layers", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
