"""Time the phases of small trainings, generations and evaluations that a seed draws (``host_cases.py``).

python benchmarks/timing/host_drawn.py --out FILE.jsonl [--time-limit 90]

They say what the host takes for what plain trainings do not have: tokens, evaluations, checkpoints, activations in host
memory, windows of attention, quantised weights.  Each is a line at once: microseconds between the events of a step
(medians), of each evaluation and of each token, and the probe of the host's pace between the steps.  Cases with an even
number were used for ``catalog/hosts.yaml``, those with an odd one check it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import processes  # noqa: E402
from host_cases import cases  # noqa: E402

from trainatomy.training.observer import Silent  # noqa: E402

Mapping = dict[str, Any]
EVALUATED_STEPS = (1, 2, 3)
FP16_WARM_UP, WARM_UP, CALLS_OF_WARM_UP = 8, 4, 2
TIMED_STEPS, TIMED_CALLS = 8, 6


Event = tuple[str, float]


class Watch(Silent):
    """Notes the moment of each event of a loop; the pace of the host is probed after each step."""

    def __init__(self, *, evaluates: bool) -> None:
        self.steps: list[list[Event]] = []
        self.evaluations: list[list[Event]] = []
        self.probes: list[float] = []
        self._evaluates, self._now = evaluates, list[Event]()

    def _note(self, name: str, *, waits: bool = False) -> None:
        import torch

        if waits:
            torch.cuda.synchronize()
        self._now.append((name, time.perf_counter()))

    def step_begin(self, step: int) -> None:
        self._note("step_begin")

    def micro_step_begin(self, micro_step: int) -> None:
        self._note("micro_step_begin")

    def forward_end(self) -> None:
        self._note("forward_end")

    def loss_kept(self, loss: Any) -> None:
        self._note("loss_kept")

    def micro_step_end(self, micro_step: int) -> None:
        self._note("micro_step_end")

    def optimizer_begin(self) -> None:
        self._note("optimizer_begin")

    def optimizer_end(self) -> None:
        self._note("optimizer_end")

    def generation_begin(self, tokens: int) -> None:
        self._note("generation_begin")

    def token_begin(self, token: int) -> None:
        self._note("token_begin")

    def generation_end(self) -> None:
        self._note("generation_end", waits=True)

    def evaluates_after(self, step: int) -> bool:
        return self._evaluates and step in EVALUATED_STEPS

    def evaluation_begin(self, batches: int) -> None:
        self._now = []
        self._note("evaluation_begin", waits=True)

    def evaluation_forward_begin(self) -> None:
        self._note("evaluation_forward_begin")

    def evaluation_forward_end(self, outputs: Any) -> None:
        self._note("evaluation_forward_end")

    def evaluation_end(self) -> None:
        self._note("evaluation_done")
        self._note("evaluation_end", waits=True)
        self.evaluations.append(self._now)
        self._now = [("after_step", time.perf_counter())]

    def step_end(self, step: int) -> None:
        from trainatomy.measurement.device.host_probe import probe_seconds

        self._note("step_end")
        self.steps.append(self._now)
        self.probes.append(probe_seconds())
        self._now = [("after_step", time.perf_counter())]


def between(events: Sequence[Event]) -> tuple[dict[str, float], dict[str, int]]:
    """Return the microseconds between events that follow each other, by both names, and how often they do."""
    found, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for (one, began), (other, ended) in pairwise(events):
        found[f"{one}>{other}"] += 1e6 * (ended - began)
        counts[f"{one}>{other}"] += 1
    return dict(found), dict(counts)


def measured(mapping: Mapping, watching: type[Watch] = Watch) -> Mapping:
    """Run a case on the GPU, observed by a ``Watch``, and return its times."""
    import torch

    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.quantization import load_on_device
    from trainatomy.training.run import run
    from trainatomy.workload.schema import Workload

    workload = Workload.from_mapping({**mapping, "name": "drawn", "gpu": "h200"})
    generates = workload.mode == "generation"
    warm_up = CALLS_OF_WARM_UP if generates else FP16_WARM_UP if workload.train.fp16 else WARM_UP
    watch = watching(evaluates=not generates and bool(workload.evaluates))
    torch.manual_seed(0)
    if workload.model.quantization:
        model = load_on_device(workload, build_model(workload), "cuda")
    else:
        with torch.device("cuda"):
            model = build_model(workload)
    with suppress(EnoughSteps):
        steps = warm_up + (TIMED_CALLS if generates else TIMED_STEPS)
        run(workload, model, device="cuda", steps=steps, observer=watch)
    return {"mapping": mapping, **times(watch, warm_up)}


def times(watch: Watch, warm_up: int) -> Mapping:
    """Return what is kept of a case."""
    kept = [between(step) for step in watch.steps[warm_up:]]
    names = dict.fromkeys(name for us, _ in kept for name in us)
    found: Mapping = {"us": {name: round(median(us.get(name, 0.0) for us, _ in kept), 1) for name in names}}
    found["counts"] = kept[-1][1]
    found["steps"] = [round(sum(us.values()), 1) for us, _ in kept]
    found["step_probes_us"] = [round(1e6 * one, 1) for one in watch.probes]
    tokens = [list(_tokens(step)) for step in watch.steps[warm_up:]]
    found |= {"tokens": tokens} if any(tokens) else {}
    if readings := getattr(watch, "readings", None):
        found["readings"] = readings[warm_up - 1 :]
    if watch.evaluations:
        found["evaluations"] = [_evaluation(events) for events in watch.evaluations]
    return found


def _tokens(step: Sequence[Event]) -> Iterator[tuple[str, float]]:
    for name, moment in step:
        if name.startswith(("token", "generation")):
            yield name, round(1e6 * (moment - step[0][1]), 1)


def _evaluation(events: Sequence[Event]) -> Mapping:
    us, counts = between(events)
    batches = [round(1e6 * (after - before), 1) for (_, before), (_, after) in pairwise(events)]
    return {"us": us, "counts": counts, "whole": round(1e6 * (events[-1][1] - events[0][1]), 1), "batches": batches}


def measure(
    cases: Iterable[tuple[str, Any]], measuring: Callable[[Any], Mapping], out: Path, time_limit: float
) -> None:
    """Measure cases in this process, which initialises CUDA; each is a line at once."""
    import torch

    began = time.monotonic()
    torch.ones(1, device="cuda")
    for name, case in cases:
        if time.monotonic() - began > time_limit:
            print(f"{name}: left out, out of time", flush=True)
            continue
        line: Mapping = {"name": name, "gpu": torch.cuda.get_device_name()}
        try:
            line |= measuring(case)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:400]
        gc.collect()
        torch.cuda.empty_cache()
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{time.monotonic() - began:6.1f} s {name}: {line.get('error', line.get('steps'))}", flush=True)


def measure_in_fork(
    description: str | None,
    cases: Iterable[tuple[str, Any]],
    measuring: Callable[[Any], Mapping] = measured,
    seconds: float = 90,
) -> int:
    """Read the options of a script, and measure its cases in a fork of a process that has imported the libraries."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, default=seconds, help="seconds after which no case starts")
    options = parser.parse_args()
    processes.preload_for_forks()
    log = options.out.with_suffix(".log")
    process = processes.fork_and_run(partial(measure, cases, measuring, options.out, options.time_limit), log)
    while process.status() is None:
        time.sleep(0.05)
    with suppress(OSError):
        print(log.read_text(encoding="utf-8", errors="replace")[-9000:])
    return 0


if __name__ == "__main__":
    sys.exit(measure_in_fork(__doc__, cases()))
