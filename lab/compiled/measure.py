"""Measure compiled trainings, and the same ones eagerly, on this machine's GPU.

``python lab/compiled/measure.py --out FOLDER [--cases tuned] [--parallel 5] [--limit 540]``

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


def run_case(name: str, case: dict[str, Any], part: str, out: Path) -> None:
    """Measure a part of a training in this process, and write its line."""
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
    from trainatomy.training.observer import Silent
    from trainatomy.training.run import run
    from trainatomy.workload import Workload

    content = dict(case["workload"])
    content["train"] = {**content.get("train", {}), "torch_compile": part != "eager"}
    layers = content["train"].pop("dynamo_use_regional_compilation", False)
    if layers:
        content["train"]["torch_compile"] = False
    workload = Workload.model_validate(content)

    class Observer(Watched, Silent):  # type: ignore[misc]
        pass

    codes = written_code() if part == "memory" else []
    observer = Observer(part, Path(f"/tmp/{name}.json"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build_model(workload)
    if layers and part != "eager":
        for stack in model.modules():
            if isinstance(stack, torch.nn.ModuleList) and len(stack) > 1:
                for layer in stack:
                    layer.compile()
    first = time.monotonic()
    with suppress(EnoughSteps):
        run(workload, model, device="cuda", steps=100, observer=observer)
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


def main() -> None:
    """Measure the trainings, those that compile side by side first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="tuned")
    parser.add_argument("--parallel", type=int, default=5)
    parser.add_argument("--limit", type=float, default=540)
    arguments = parser.parse_args()
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    import transformers  # noqa: F401

    import trainatomy.training.run  # noqa: F401
    from trainatomy.training.model import build_model  # noqa: F401

    found = cases(arguments.cases)
    waiting = list(found)
    running: dict[str, Any] = {}
    while (waiting or running) and time.monotonic() - began < arguments.limit:
        while waiting and len(running) < arguments.parallel:
            name = waiting.pop(0)
            running[name] = context.Process(target=run_case, args=(name, found[name], "memory", arguments.out))
            running[name].start()
        time.sleep(0.2)
        running = {name: process for name, process in running.items() if process.is_alive()}
    for process in running.values():
        process.kill()
    for name, case in found.items():
        for part in ("time", "eager"):
            left = arguments.limit - (time.monotonic() - began)
            if left < 5:
                print(f"{name}: {part}: left out, out of time", flush=True)
                continue
            process = context.Process(target=run_case, args=(name, case, part, arguments.out))
            process.start()
            process.join(left)
            if process.is_alive():
                process.kill()
    with gzip.open(arguments.out / "code.jsonl.gz", "wt", encoding="utf-8") as file:
        for path in sorted((arguments.out / "code").glob("*.json")):
            file.write(path.read_text(encoding="utf-8") + "\n")
            path.unlink()


if __name__ == "__main__":
    main()
