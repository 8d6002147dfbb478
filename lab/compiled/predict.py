"""Predict compiled trainings of ``cases.yaml``, and the same ones eagerly, with the compiler of the installed PyTorch.

``python lab/compiled/predict.py --out FILE.jsonl [--cases tuned] [--gpu h200] [--names a,b] [--code FOLDER]``

Each training runs in a process of its own; its line has memory, times, and the predicted microseconds of each fused
kernel.  With ``--code``, the code that Inductor wrote goes to a folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measure import cases


def predicted(name: str, case: dict[str, Any], gpu_id: str, compiles: bool, code: Path | None) -> dict[str, Any]:
    """Return a training's memory and times."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.prediction.assemble import analysis_of, step_of, time_of
    from trainatomy.simulator.compiled.module import Compiler
    from trainatomy.simulator.simulate import simulate
    from trainatomy.timing.cost_model import kernel_cost
    from trainatomy.workload import Workload

    content = dict(case["workload"])
    content["train"] = {**content.get("train", {}), "torch_compile": compiles}
    if not compiles:
        content["train"].pop("dynamo_use_regional_compilation", None)
    workload = Workload.model_validate(content)
    codes: list[str] = []
    installed = Compiler.install

    def install(compiler: Any, stack: Any) -> None:
        compiler.wrappers = codes
        installed(compiler, stack)

    patched: Any = Compiler
    patched.install = install
    gpu = find_gpu(gpu_id)
    workload = workload.model_copy(update={"gpu": gpu_id})
    if workload.data.lengths is not None:
        return of_epoch(workload)
    simulation = simulate(workload, gpu)
    analysis = analysis_of(workload, simulation, None)
    step = step_of(workload, simulation, simulation.operations, None, analysis.driver_calls)
    fused: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    total = 0.0
    for operation in simulation.operations.operations:
        call = simulation.operations.calls[operation.call]
        seconds = kernel_cost(call, step.cost_model).seconds * operation.repeats
        total += seconds
        if call.name == "inductor::fused":
            numbers = dict(call.numbers)
            entry = fused[numbers.get("kernel", "?")]
            entry[0] += operation.repeats
            entry[1] += round(seconds * 1e6, 3)
            entry[2] += float(numbers.get("bytes", 0)) * operation.repeats
    timed = time_of(workload, simulation, analysis.driver_calls, None)
    if code is not None and codes:
        (code / f"{name}.json").write_text(json.dumps({"name": name, "code": codes}), encoding="utf-8")
    return {
        "peak_allocated": analysis.memory.peak_allocated_bytes,
        "peak_reserved": analysis.memory.peak_reserved_bytes,
        "gpu_ms": round(total * 1e3, 3),
        "step_ms": round(timed.step_seconds * 1e3, 3),
        "fused": fused,
        "notes": [note for note in simulation.notes if "ompile" in note or "ynamo" in note],
    }


def of_epoch(workload: Any) -> dict[str, Any]:
    """Return the memory and the mean step of an epoch whose samples differ in length, in its first order."""
    from trainatomy.api.predicting import predict

    found = predict(workload)
    return {
        "peak_allocated": found.memory.peak_allocated_bytes,
        "peak_reserved": found.memory.peak_reserved_bytes,
        "step_ms": round(found.time.step_seconds * 1e3, 3) if found.time else None,
        "notes": list(found.notes),
    }


def write(out: Path, line: dict[str, Any], find: Callable[[], dict[str, Any]]) -> None:
    """Write a line with what a function finds, or with its error, and with the time that it took."""
    began = time.monotonic()
    try:
        line = line | find()
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:1200]
    used = resource.getrusage(resource.RUSAGE_SELF)
    line |= {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(used.ru_utime + used.ru_stime, 1)}
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{line['wall_s']:6.1f} s {line['name']}: {line.get('error') or line['step_ms']}", flush=True)


def one_by_one(which: str, names: str, run: Callable[[str, dict[str, Any]], None]) -> None:
    """Call a function with each case of a part of ``cases.yaml``, or with those named, in a process of its own."""
    import transformers  # noqa: F401

    import trainatomy.training.run  # noqa: F401
    from trainatomy.training.model import build_model  # noqa: F401

    wanted = set(filter(None, names.split(",")))
    for name, case in cases(which).items():
        if not wanted or name in wanted:
            process = multiprocessing.get_context("fork").Process(target=run, args=(name, case))
            process.start()
            process.join()


def run_case(gpu_id: str, out: Path, code: Path | None, name: str, case: dict[str, Any]) -> None:
    """Predict a training in this process, and write its lines."""
    for part in ("compiled", "eager"):
        find = partial(predicted, name, case, gpu_id, part == "compiled", code)
        write(out, {"name": name, "part": part}, find)


def main() -> None:
    """Predict the trainings one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="tuned")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--names", default="")
    parser.add_argument("--code", type=Path)
    arguments = parser.parse_args()
    if arguments.code:
        arguments.code.mkdir(parents=True, exist_ok=True)
    one_by_one(arguments.cases, arguments.names, partial(run_case, arguments.gpu, arguments.out, arguments.code))


if __name__ == "__main__":
    main()
