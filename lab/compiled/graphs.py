"""Measure trainings compiled with CUDA graphs (``mode="reduce-overhead"``) on this machine's GPU, step by step.

``python lab/compiled/graphs.py --out FOLDER [--cases graphs_tuned] [--parallel 5] [--limit 300]``

Each training runs in a process of its own, with a folder of its own for Inductor's cache:

memory    the first run, as a user's: what is allocated and reserved in each step, and the segments of each memory pool
          at the end of some steps; several trainings at a time, because compiling keeps the GPU idle
time      a later run, with the code of the first: seconds of steps, memory outside the allocator, and from a profile of
          two steps the time of each ``cudaGraphLaunch`` and the gaps between the kernels of a graph
plain     the same without CUDA graphs (``mode="default"``)

Before them, one process measures graphs of empty kernels: what a launch takes of the CPU, and the GPU from kernel to
kernel.  Each result is a line of ``graphs.jsonl`` at once; what PyTorch said about graphs that it skipped is in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from measure import cases

SEEN = (1, 2, 3, 6)
"""Steps at whose end the segments are written down."""
TIMED, PROFILED = 14, 2


class Watched:
    """An observer that notes the memory of the first steps, and then times or profiles some."""

    def __init__(self, part: str, trace: Path) -> None:
        import torch

        self.part, self.trace = part, trace
        self.steps: list[dict[str, int]] = []
        self.segments: dict[int, Any] = {}
        self.events: list[Any] = []
        self.host: list[float] = []
        self.outside: list[int] = []
        self.profiler: Any = None
        self.event = lambda: torch.cuda.Event(enable_timing=True)

    def step_begin(self, step: int) -> None:
        """Note what the step before left."""
        import torch

        from trainatomy.measurement.step.timer import EnoughSteps

        first_timed, last = max(SEEN) + 1, max(SEEN) + 1 + TIMED
        if step < first_timed:
            torch.cuda.synchronize()
            statistics = torch.cuda.memory_stats()
            names = ("allocated_bytes", "reserved_bytes")
            self.steps.append(
                {f"{name}.{when}": statistics[f"{name}.all.{when}"] for name in names for when in ("current", "peak")}
            )
            torch.cuda.reset_peak_memory_stats()
            free, total = torch.cuda.mem_get_info()
            self.outside.append(total - free - statistics["reserved_bytes.all.current"])
            if step in SEEN and self.part == "memory":
                self.segments[step] = pools(torch.cuda.memory_snapshot())
            if step == max(SEEN) and self.part == "memory":
                raise EnoughSteps
            return
        if step <= last:
            self.events.append(self.event())
            self.events[-1].record()
            self.host.append(time.perf_counter())
        if step == last:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.__enter__()
        if step == last + PROFILED:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)
            self.profiler.export_chrome_trace(str(self.trace))
            raise EnoughSteps

    def result(self) -> dict[str, Any]:
        """Return what was noted."""
        found: dict[str, Any] = {"steps": self.steps, "segments": self.segments, "outside": self.outside}
        if self.part != "memory":
            times = [first.elapsed_time(second) for first, second in zip(self.events, self.events[1:], strict=False)]
            host = [(second - first) * 1e3 for first, second in zip(self.host, self.host[1:], strict=False)]
            found |= {"steps_ms": [round(ms, 3) for ms in times], "step_ms": median(times), "host_ms": median(host)}
            found |= profile(self.trace)
        return found


def pools(snapshot: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each memory pool's segments: their sizes, what is allocated in them, and the largest free block."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for segment in snapshot:
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        entry = [segment["total_size"], segment["allocated_size"], segment["active_size"], max(free, default=0)]
        found[str(tuple(segment.get("segment_pool_id", (0, 0))))].append(entry)
    return {pool: sorted(entries, reverse=True) for pool, entries in found.items()}


def profile(path: Path) -> dict[str, Any]:
    """Return the launches of graphs in a trace, the gaps between a graph's kernels, and all kernels by name."""
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    runtime = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    graphs: dict[int, list[Any]] = defaultdict(list)
    for event in on_gpu:
        graphs[event["args"].get("correlation", 0)].append(event)
    launched = {event["args"].get("correlation"): event for event in runtime if "GraphLaunch" in event["name"]}
    found = []
    for correlation, launch in launched.items():
        nodes = sorted(graphs.get(correlation, ()), key=lambda event: event["ts"])
        gaps = [after["ts"] - before["ts"] - before["dur"] for before, after in itertools.pairwise(nodes)]
        found.append(
            {
                "launch_us": launch["dur"],
                "nodes": len(nodes),
                "busy_us": round(sum(node["dur"] for node in nodes), 1),
                "span_us": round(nodes[-1]["ts"] + nodes[-1]["dur"] - nodes[0]["ts"], 1) if nodes else 0,
                "gap_us": round(median(gaps), 3) if gaps else 0,
                "gaps_us": [round(gap, 2) for gap in sorted(gaps)[:: max(1, len(gaps) // 10)]],
                "wait_us": round(nodes[0]["ts"] - launch["ts"], 1) if nodes else 0,
            }
        )
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in on_gpu:
        by_name[event["name"][:120]].append(event["dur"])
    calls = Counter(event["name"] for event in runtime)
    times: Counter[str] = Counter()
    for event in runtime:
        times[event["name"]] += event["dur"]
    return {
        "graphs": found,
        "gpu_ms": sum(event["dur"] for event in on_gpu) * 1e-3 / PROFILED,
        "runtime": {name: [calls[name] / PROFILED, round(times[name] / PROFILED, 1)] for name in calls},
        "kernels": {name: [len(us) / PROFILED, round(sum(us) / PROFILED, 2)] for name, us in by_name.items()},
    }


def run_case(name: str, case: dict[str, Any], part: str, out: Path) -> None:
    """Measure a part of a training in this process, and write its line."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"/tmp/inductor/{name}"
    said = out / f"{name}-{part}.log"
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    began = time.monotonic()
    line: dict[str, Any] = {"name": name, "part": part}
    try:
        line |= measured(name, case, part)
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:1200]
    line["wall_s"] = round(time.monotonic() - began, 1)
    wanted = ("cudagraph", "CUDAGraph", "skipping", "recompile")
    spoken = [
        text[:300] for text in said.read_text(errors="replace").splitlines() if any(word in text for word in wanted)
    ]
    line["said"] = dict(Counter(spoken).most_common(20))
    said.unlink()
    with (out / "graphs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['wall_s']:6.1f} s {part} {name}: {line.get('error') or line.get('step_ms')}", flush=True)


def measured(name: str, case: dict[str, Any], part: str) -> dict[str, Any]:
    """Run a training and return what was measured."""
    import torch

    from trainatomy.training.model import build_model
    from trainatomy.training.observer import Observer
    from trainatomy.training.run import run
    from trainatomy.workload import Workload

    content = dict(case["workload"])
    mode = content["train"].get("torch_compile_mode", "reduce-overhead")
    content["train"] = {**content["train"], "torch_compile": True, "torch_compile_mode": mode}
    if part == "plain":
        content["train"]["torch_compile_mode"] = "default"
    workload = Workload.model_validate(content)

    class WatchedLoop(Watched, Observer):
        pass

    observer = WatchedLoop(part, Path(f"/tmp/{name}-{part}.json"))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = build_model(workload)
    first = time.monotonic()
    with suppress(_ends()):
        run(workload, model, device="cuda", steps=100, observer=observer)
    counters = torch._dynamo.utils.counters
    counts = {group: dict(counters[group]) for group in ("graph_break", "stats", "aot_autograd")}
    counts["inductor"] = {key: count for key, count in counters["inductor"].items() if "cudagraph" in key}
    return {"run_s": round(time.monotonic() - first, 1), **observer.result(), "counters": counts}


def _ends() -> type[BaseException]:
    """Return what ends a run early."""
    from trainatomy.measurement.step.timer import EnoughSteps

    return EnoughSteps


def empty_graphs(out: Path) -> None:
    """Measure graphs of small kernels: microseconds of the CPU a launch, of the GPU from kernel to kernel."""
    import torch

    found = []
    value = torch.zeros(256, device="cuda")
    for nodes in (1, 3, 10, 30, 100, 300, 1000, 3000):
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.mem_get_info()[0]
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                value.add_(1)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0]
        host, spans = [], []
        for _ in range(20):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            began = time.perf_counter()
            graph.replay()
            host.append((time.perf_counter() - began) * 1e6)
            end.record()
            torch.cuda.synchronize()
            spans.append(begin.elapsed_time(end) * 1e3)
        eager = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(nodes):
                value.add_(1)
            end.record()
            torch.cuda.synchronize()
            eager.append(begin.elapsed_time(end) * 1e3)
        found.append(
            {
                "nodes": nodes,
                "launch_us": round(median(host), 2),
                "span_us": round(median(spans), 2),
                "eager_us": round(median(eager), 2),
                "device_bytes": before - after,
            }
        )
        kept.append(graph)
    import torch.version

    line = {"name": "empty", "graphs": found, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    with (out / "graphs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"empty graphs: {found}", flush=True)


kept: list[Any] = []
"""Graphs that are not destroyed while others are measured."""


def main() -> None:
    """Measure the trainings, those that compile side by side first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="graphs_tuned")
    parser.add_argument("--parts", default="memory,time,plain")
    parser.add_argument("--parallel", type=int, default=5, help="trainings that compile at a time")
    parser.add_argument("--limit", type=float, default=300)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit
    import transformers  # noqa: F401

    import trainatomy.training.run  # noqa: F401
    from trainatomy.training.model import build_model  # noqa: F401

    arguments.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    process: Any = context.Process(target=empty_graphs, args=(arguments.out,))
    process.start()
    process.join(60)
    for part in arguments.parts.split(","):
        waiting, running = list(cases(arguments.cases).items()), list[Any]()
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < (arguments.parallel if part == "memory" else 1):
                process = context.Process(target=run_case, args=(*waiting.pop(0), part, arguments.out))
                process.start()
                running.append(process)
            time.sleep(0.2)
            running = [process for process in running if process.is_alive()]
        for process in running:
            process.kill()
        for name, _ in waiting:
            print(f"{name}: {part}: left out, out of time", flush=True)


if __name__ == "__main__":
    main()
