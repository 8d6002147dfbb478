"""Time bitsandbytes' kernels, the Python around them, and whole steps of QLoRA on this machine's GPU.

``python benchmarks/timing/quantised_on_gpu.py --out FILE.jsonl [--parts kernels,host,steps]`` appends a line for each
result.  Parts run in forks of a process that has imported the libraries:

kernels   each kernel of 4-bit and 8-bit layers by the profiler: median over runs; the L2 cache is flushed before each
host      the CPU's microseconds for a layer, forward and backward, plain and with 4-bit weights, with and without LoRA,
          so small that the GPU never bounds them; a view, a copy and a plain product say how quick the host is
steps     the GPU's own time by kernel and the time of steps, of cases of ``benchmarks/everyday`` by their names
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "accuracy"), str(HERE.parent / "everyday")]

import everyday_cases  # noqa: E402
import processes  # noqa: E402
import trainings  # noqa: E402
from measure_trainings import PROFILED_STEPS, measured  # noqa: E402

SHAPES = ((512, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (4096, 4096), (14336, 4096), (3584, 18944))
"""Rows and columns of weights: projections of Llama 1B and 8B and of Qwen 7B."""
RUNS, REPEATS, CALLS = 6, 7, 60
CASES = (
    "qlora-llama-3.2-1b",
    "qlora-llama-3.2-1b-unprepared",
    "qlora-llama-3.2-1b-plain-loop",
    "nf4-single-qwen2.5-1.5b",
    "int8-llama-3.2-3b-inference",
)
"""Cases of the tuning half."""


def works(device: str) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Yield what is timed: a description, and a function that runs it once."""
    import bitsandbytes.functional as functional
    import torch

    for rows, columns in SHAPES:
        for kind, double, dtype in (
            ("nf4", False, torch.bfloat16),
            ("nf4", True, torch.bfloat16),
            ("fp4", False, torch.float16),
            ("nf4", False, torch.float32),
        ):
            weight = torch.randn(rows, columns, dtype=dtype, device=device)
            packed, state = functional.quantize_4bit(weight, compress_statistics=double, quant_type=kind)
            about = {"rows": rows, "columns": columns, "kind": kind, "double": double, "dtype": str(dtype)[6:]}
            yield {"work": "dequantize_4bit", **about}, partial(functional.dequantize_4bit, packed, state)
            if dtype == torch.bfloat16 and not double:
                for length in (1, 4, 16, 128, 512):
                    data = torch.randn(length, columns, dtype=dtype, device=device)
                    yield {"work": "gemm_4bit", "length": length, **about}, partial(_product_4bit, data, packed, state)
                quantise = partial(functional.quantize_4bit, weight, compress_statistics=double, quant_type=kind)
                yield {"work": "quantize_4bit", **about}, quantise
            del weight
        for length in (256, 2048):
            data = torch.randn(length, columns, dtype=torch.float16, device=device)
            yield {"work": "int8", "length": length, "rows": rows, "columns": columns}, _layer_8bit(rows, columns, data)


def _product_4bit(data: Any, packed: Any, state: Any) -> Any:
    import bitsandbytes

    return bitsandbytes.matmul_4bit(data, packed.t(), quant_state=state)


def _layer_8bit(rows: int, columns: int, data: Any) -> Callable[[], Any]:
    import bitsandbytes
    import torch

    layer = bitsandbytes.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = bitsandbytes.nn.Int8Params(torch.randn(rows, columns, dtype=torch.float16), requires_grad=False)
    layer = layer.to(data.device)
    return partial(layer, data)


def time_kernels(write: Callable[[dict[str, Any]], None], deadline: float) -> None:
    """Write the kernels of each work, with the median of their durations in microseconds."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for about, work in works("cuda"):
        if time.monotonic() > deadline:
            break
        try:
            with torch.no_grad():
                work()
                torch.cuda.synchronize()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                    for _ in range(RUNS):
                        flush.zero_()
                        work()
                    torch.cuda.synchronize()
            found: dict[str, list[float]] = defaultdict(list)
            for event in profiler.events():
                found[event.name].append(event.device_time)
            kernels = {name[:120]: [len(each) / RUNS, round(median(each), 3)] for name, each in found.items()}
            write({"part": "kernels", **about, "kernels": kernels})
        except Exception as error:
            write({"part": "kernels", **about, "error": f"{type(error).__name__}: {error}"[:300]})


def layers(size: int) -> Iterator[tuple[str, Any]]:
    """Yield small layers on the GPU, by name."""
    import bitsandbytes
    import torch
    from peft import LoraConfig, get_peft_model

    def plain() -> Any:
        return torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16)

    def packed(double: bool) -> Any:
        layer = bitsandbytes.nn.Linear4bit(
            size, size, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=double
        )
        layer.weight.data = torch.randn(size, size, dtype=torch.bfloat16)
        return layer

    makes: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "4-bit": partial(packed, False),
        "4-bit double": partial(packed, True),
    }
    for name, make in makes.items():
        yield name, make().cuda().requires_grad_(False)
        wrapped = torch.nn.Sequential(make())
        adapted = get_peft_model(wrapped.cuda(), LoraConfig(r=8, lora_alpha=16, target_modules=["0"]))
        yield f"{name} lora", adapted.base_model.model[0]


def time_host(write: Callable[[dict[str, Any]], None], deadline: float) -> None:
    """Write the CPU's microseconds for each call of a small layer, with and without autocast and checkpointing."""
    import torch

    from trainatomy.measurement.device.host_probe import PROBE, probe_seconds

    small = torch.randn(8, 8, device="cuda")
    references = {
        "view": lambda: small.view(64),
        "copy": lambda: small.to(torch.bfloat16),
        "mul": lambda: small * 2.0,
        "mm": lambda: torch.mm(small, small),
    }
    write({"part": "host", "probe": PROBE, "probe_us": [probe_seconds() * 1e6 for _ in range(9)]})
    for name, work in references.items():
        write({"part": "host", "reference": name, "us": _microseconds(work)})
    data = torch.randn(512, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradient = torch.ones_like(data)
    for name, layer in layers(512):
        for autocast in (False, True):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):

                def forward(layer: Any = layer) -> Any:
                    return layer(data)

                def both(layer: Any = layer) -> None:
                    layer(data).backward(gradient)

                with torch.no_grad():
                    inference = _microseconds(forward)
                once = _microseconds(forward)
                whole = _microseconds(both)
            times = {"inference": inference, "forward": once, "both": whole}
            write({"part": "host", "layer": name, "autocast": autocast, **times})
        if time.monotonic() > deadline:
            break
    write({"part": "host", "probe": PROBE, "probe_us": [probe_seconds() * 1e6 for _ in range(9)]})


def _microseconds(function: Callable[[], Any]) -> list[float]:
    """Return the mean time of a call in each of several rounds, between which the GPU catches up."""
    import torch

    function()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append(round((time.perf_counter() - began) / CALLS * 1e6, 2))
    return times


class _Row:
    """A case of ``benchmarks/everyday``, in the words of ``measure_trainings``."""

    def __init__(self, case: everyday_cases.Case, gpu: str) -> None:
        self.name, self._workload = case.name, case.workload(gpu)

    def workload(self, folder: Path) -> Any:
        return self._workload


def time_steps(write: Callable[[dict[str, Any]], None], deadline: float, gpu: str, names: str) -> None:
    """Write the time of steps and the GPU's own by kernel, of one case after the other."""
    import torch

    trainings.SHOWN_KERNELS = 60
    work = Path("/tmp/trainatomy-quantised")
    work.mkdir(exist_ok=True)
    for case in everyday_cases.chosen(everyday_cases.cases(), names, None):
        for part in ("steps", "kernels"):
            if time.monotonic() > deadline:
                return
            line = {"part": "steps", "name": case.name, "way": part, "profiled": PROFILED_STEPS}
            try:
                row: Any = _Row(case, gpu)
                line |= measured(row, part, work)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:400]
            gc.collect()
            torch.cuda.empty_cache()
            write(line)


def main() -> int:
    """Time the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="kernels,host,steps")
    parser.add_argument("--part-limit", type=float, default=50, help="seconds after which nothing of a part starts")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--names", default=",".join(CASES[:4]))
    options = parser.parse_args()
    parts: dict[str, Callable[[Callable[[dict[str, Any]], None], float], None]] = {
        "kernels": time_kernels,
        "host": time_host,
        "steps": partial(time_steps, gpu=options.gpu, names=options.names),
    }

    def run_part(part: str) -> None:
        def write(line: dict[str, Any]) -> None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

        parts[part](write, time.monotonic() + options.part_limit)

    processes.preload()
    for part in options.parts.split(","):
        log = options.out.with_suffix(".log")
        process = processes.fork_and_run(partial(run_part, part), log)
        ends = time.monotonic() + options.part_limit + 25
        while process.status() is None and time.monotonic() < ends:
            time.sleep(0.2)
        if process.status() is None:
            process.kill()
        print(part, process.status(), log.read_text(encoding="utf-8", errors="replace")[-1500:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
