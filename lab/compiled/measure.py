"""Measure compiled trainings, and the same ones eagerly, on this machine's GPU.

``python lab/compiled/measure.py --out FOLDER [--cases tuned] [--gpus 2] [--parallel 5] [--limit 540]``

Each training runs in a process of its own, with a folder of its own for Inductor's cache:

memory    the first run, as a user's: what is allocated and reserved at most; several trainings at a time, because
          compiling keeps the GPU idle
time      a later run, with the code of the first: seconds of steps by CUDA events, then kernels by the profiler
eager     the same training without the compiler: memory and seconds

Each result is a line of ``results.jsonl`` at once; ``code.jsonl.gz`` has the code that Inductor wrote.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
WARM_UP, TIMED, PROFILED = 4, 12, 2


def cases(which: str) -> dict[str, dict[str, Any]]:
    """Return the trainings of a part of ``cases.yaml`` by name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))[which]
    return found


class Watched:
    """An observer that times steps after a warm-up, then profiles some."""

    def __init__(self, part: str, trace: Path) -> None:
        import torch

        self.part, self.trace = part, trace
        self.events: list[Any] = []
        self.profiler: Any = None
        self.last = WARM_UP if part == "memory" else WARM_UP + TIMED
        self.event = lambda: torch.cuda.Event(enable_timing=True)

    def step_begin(self, step: int) -> None:
        import torch

        from trainatomy.measurement.step.timer import EnoughSteps

        if step >= WARM_UP and step <= self.last:
            self.events.append(self.event())
            self.events[-1].record()
        if step == self.last:
            torch.cuda.synchronize()
            if self.part != "time":
                raise EnoughSteps
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.__enter__()
        if step == self.last + PROFILED:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.trace))
            raise EnoughSteps

    def result(self) -> dict[str, Any]:
        """Return the times."""
        times = [first.elapsed_time(second) for first, second in zip(self.events, self.events[1:], strict=False)]
        found: dict[str, Any] = {"steps_ms": [round(one, 3) for one in times]}
        if times:
            found["step_ms"] = median(times)
        if self.part == "time":
            found |= kernels(self.trace)
        return found


def kernels(path: Path) -> dict[str, Any]:
    """Return the kernels of the profiled steps: how often each ran in a step, and its microseconds in all."""
    from trainatomy.measurement.profiled_calls import read_trace
    from trainatomy.timing.streams import covered

    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in read_trace(path) if event.get("cat") in on_gpu]
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_name[event["name"][:200]].append(event["dur"])
    return {
        "busy_ms": covered((one["ts"], one["ts"] + one["dur"]) for one in events) * 1e-3 / PROFILED,
        "gpu_ms": sum(event["dur"] for event in events) * 1e-3 / PROFILED,
        "kernels": {name: [len(us) / PROFILED, round(sum(us) / PROFILED, 2)] for name, us in by_name.items()},
    }


def run_case(name: str, case: dict[str, Any], part: str, out: Path, gpu: int) -> None:
    """Measure a part of a training in this process, and write its line."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"/tmp/inductor/{name}"
    began = time.monotonic()
    line: dict[str, Any] = {"name": name, "part": part}
    try:
        line |= measured(name, case, part, out)
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:600]
    line["wall_s"] = round(time.monotonic() - began, 1)
    with (out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['wall_s']:6.1f} s {part} {name}: {line.get('error') or line.get('step_ms')}", flush=True)


def measured(name: str, case: dict[str, Any], part: str, out: Path) -> dict[str, Any]:
    """Run a training and return what was measured."""
    import torch

    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.observer import Observer
    from trainatomy.training.run import run
    from trainatomy.workload import Workload

    content = dict(case["workload"])
    content["train"] = {**content.get("train", {}), "torch_compile": part != "eager"}
    if part == "eager":
        content["train"].pop("dynamo_use_regional_compilation", None)
    workload = Workload.model_validate(content)

    class WatchedLoop(Watched, Observer):
        pass

    codes = written_code() if part == "memory" else []
    observer = WatchedLoop(part, Path(f"/tmp/{name}.json"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build_model(workload)
    first, batches = time.monotonic(), epoch(workload) if workload.data.lengths else None
    steps = 100 if batches is None else len(batches.batches) // workload.train.gradient_accumulation_steps
    if batches is not None:
        observer.last = steps  # no step of an epoch is timed
    with suppress(EnoughSteps):
        run(workload, model, device="cuda", steps=steps, observer=observer, make_batch=batches)
    statistics = torch.cuda.memory_stats()
    found = {
        "peak_allocated": statistics["allocated_bytes.all.peak"],
        "peak_reserved": statistics["reserved_bytes.all.peak"],
        "run_s": round(time.monotonic() - first, 1),
        **observer.result(),
    }
    if codes:
        (out / "code").mkdir(exist_ok=True)
        (out / "code" / f"{name}.json").write_text(json.dumps({"name": name, "code": codes}), encoding="utf-8")
    return found


def epoch(workload: Any) -> Any:
    """Return the batches of the first order of an epoch whose samples differ in length."""
    from trainatomy.training.batch import BatchesOfLengths
    from trainatomy.training.lengths import orders

    return BatchesOfLengths(tuple(batch for step in orders(workload)[0].steps for batch in step))


def written_code() -> list[str]:
    """Return a list that will hold the code of all graphs that Inductor compiles in this process."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    generate = GraphLowering.codegen

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = generate(self, *args, **kwargs)
        codes.append(str(getattr(found[0], "value", found[0])))
        return found

    GraphLowering.codegen = keep  # type: ignore[method-assign]
    return codes


class Places:
    """Processes that run side by side, each with a GPU of its own if it asks for one."""

    def __init__(self, gpus: int, out: Path, deadline: float) -> None:
        self._gpus, self._out, self._deadline = gpus, out, deadline
        self._context = multiprocessing.get_context("fork")

    def run(self, jobs: list[tuple[str, dict[str, Any], str]], at_once: int) -> None:
        """Run parts of trainings, so many at a time on each GPU."""
        waiting, running = list(jobs), dict[Any, int]()
        while (waiting or running) and time.monotonic() < self._deadline:
            for place in range(self._gpus):
                while waiting and list(running.values()).count(place) < at_once:
                    arguments = (*waiting.pop(0), self._out, place)
                    process = self._context.Process(target=run_case, args=arguments)
                    process.start()
                    running[process] = place
            time.sleep(0.2)
            running = {process: place for process, place in running.items() if process.is_alive()}
        for process in running:
            process.kill()
        for name, _, part in waiting:
            print(f"{name}: {part}: left out, out of time", flush=True)


_MEASURE = """
import dataclasses, json, sys, trainatomy
print(json.dumps(dataclasses.asdict(trainatomy.measure(trainatomy.read_workload(sys.argv[1]), components=False))))
"""


def measure_ranks(name: str, case: dict[str, Any], out: Path, time_limit: float) -> None:
    """Measure a training on several GPUs, compiled and eagerly, by `trainatomy.measure`."""
    for part in ("time", "eager"):
        content = {**case["workload"], "train": {**case["workload"]["train"], "torch_compile": part == "time"}}
        if part == "eager":
            content["train"].pop("dynamo_use_regional_compilation", None)
        path = Path(f"/tmp/{name}-{part}.yaml")
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"/tmp/inductor/{name}"}
        command = [sys.executable, "-c", _MEASURE, str(path)]
        try:
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=time_limit)
            line = {"name": name, "part": part, "measured": json.loads(run.stdout.splitlines()[-1])}
        except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
            line = {"name": name, "part": part, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        with (out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"ranks {part} {name}: {line.get('error') or 'measured'}", flush=True)


def main() -> None:
    """Measure the trainings, those that compile side by side first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="tuned")
    parser.add_argument("--parts", default="memory,time,eager")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=5, help="trainings that compile at a time on each GPU")
    parser.add_argument("--limit", type=float, default=540)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.limit
    import transformers  # noqa: F401

    import trainatomy.training.run  # noqa: F401
    from trainatomy.training.model import build_model  # noqa: F401

    found = cases(arguments.cases)
    places = Places(arguments.gpus, arguments.out, deadline)
    parts = arguments.parts.split(",")
    if "memory" in parts:
        places.run([(name, case, "memory") for name, case in found.items()], arguments.parallel)
    alone = [part for part in parts if part != "memory"]
    places.run([(name, case, part) for name, case in found.items() for part in alone], 1)
    for name, case in cases("two_gpus").items() if arguments.gpus > 1 else ():
        if (left := deadline - time.monotonic()) > 10:
            measure_ranks(name, case, arguments.out, left)
    with gzip.open(arguments.out / "code.jsonl.gz", "wt", encoding="utf-8") as file:
        for path in sorted((arguments.out / "code").glob("*.json")):
            file.write(path.read_text(encoding="utf-8") + "\n")
            path.unlink()


if __name__ == "__main__":
    main()
