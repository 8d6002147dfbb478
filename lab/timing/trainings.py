"""Predict the time of trainings (``trainings.yaml``): the GPU's own time, and the whole step.

python lab/timing/trainings.py predict [--gpu ID]  # with cuDNN's library: predictions/trainings-ID.jsonl
python lab/timing/measure_trainings.py --out FILE [--gpu ID]  # on the GPU: what is predicted
python lab/timing/training_errors.py report FILE [--gpu ID]  # errors, by what bounds the step
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402

from trainatomy.workload.schema import Workload  # noqa: E402

TRAININGS = HERE / "trainings.yaml"
PREDICTIONS = HERE / "predictions"
PACES = (0.7, 0.85, 1.15, 1.3, 1.5, 2.0, 3.0)
"""Paces of the host for which a step is predicted, besides 1; the measured pace lies between two."""
SHOWN_KERNELS = 10
PAGEABLE_COPY = "Memcpy HtoD (Pageable"
"""How a profiler names a copy of a batch from memory that is not pinned."""


def rows() -> list[grid.Row]:
    """Return the trainings in an order without families, so that a time limit cuts all of them short."""
    return sorted(grid.rows(TRAININGS), key=lambda row: hashlib.sha256(row.name.encode()).digest())


def predictions_of(gpu_id: str) -> Path:
    """Return the file with the predictions for a GPU."""
    return PREDICTIONS / f"trainings-{gpu_id}.jsonl"


def records_of(gpu_id: str) -> Path:
    """Return the file with what was measured on a GPU: the lines of ``measure_trainings.py``, compressed."""
    return HERE / "records" / f"trainings-{gpu_id}.jsonl.gz"


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines, which may be compressed; none if there is no file."""
    content = path.read_bytes() if path.exists() else b""
    text = gzip.decompress(content) if path.suffix == ".gz" and content else content
    return [json.loads(line) for line in text.decode().splitlines()]


def prediction(row: grid.Row, gpu_id: str) -> dict[str, Any]:
    """Predict the GPU's own time of a training, and the step at several paces of the host."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.prediction.assemble import analysis_of
    from trainatomy.simulator.simulate import simulate

    gpu = find_gpu(gpu_id)
    workload = row.workload(HERE).model_copy(update={"gpu": gpu_id})
    simulation = simulate(workload, gpu)
    return priced(row, workload, simulation, analysis_of(workload, simulation, None).driver_calls)


def priced(row: grid.Row, workload: Workload, simulation: Any, driver_calls: Sequence[Any]) -> dict[str, Any]:
    """Return the predicted times of a simulated training."""
    from recurrent_times import RECURRENT, recurrent_seconds

    from trainatomy.catalog.machines import reference_host
    from trainatomy.prediction.assemble import step_of, time_of
    from trainatomy.timing.cost_model import kernel_cost
    from trainatomy.timing.host_costs import cpu_costs
    from trainatomy.timing.launch import batch_bytes, cpu_seconds_by_phase
    from trainatomy.workload.loops import loop_of

    found = time_of(workload, simulation, driver_calls, None, paces=PACES)
    step = step_of(workload, simulation, simulation.operations, None, driver_calls)
    operations, own, recurrent, copied = simulation.operations, 0.0, 0.0, 0.0
    for one in operations.operations:
        call = operations.calls[one.call]
        seconds = kernel_cost(call, step.cost_model).seconds * one.repeats
        if batch_bytes(call):
            copied += seconds
            continue
        own += seconds
        recurrent += seconds * (RECURRENT in call.name)
    costs = cpu_costs(reference_host().microseconds)
    batch_seconds = cpu_seconds_by_phase(operations, costs, loop_of(workload).cpu_costs)["batch"]
    paced = dict[str, float]()
    if recurrent:
        rest = own - recurrent
        own = rest + recurrent_seconds(step, 1.0)
        paced = {str(pace): rest + recurrent_seconds(step, pace) for pace in PACES}
    return {
        "name": row.name,
        "workload": dict(row.mapping),
        "gpu_seconds": _rounded(own),
        **({"gpu_at_paces": {pace: _rounded(seconds) for pace, seconds in paced.items()}} if paced else {}),
        "copied_seconds": _rounded(copied),
        "collated_seconds": _rounded(batch_seconds if workload.data.factory is None else 0.0),
        "step_seconds": _rounded(found.step_seconds),
        "at_paces": {one.pace: _rounded(one.step_seconds) for one in found.at_paces},
        "host_seconds": _rounded(found.host_seconds),
        "backward_share": _rounded(found.backward_host_share),
        "bound_by": found.bound_by,
        "launches": found.launches,
    }


def _rounded(value: float | None) -> float | None:
    """Return a number to seven digits, of which a stored prediction needs no more."""
    return None if value is None else float(f"{value:.7g}")


def predict(gpu_id: str, names: str, again: bool) -> None:
    """Store the predictions of trainings that have none, or ``again`` of all, or of those that are named."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.operators.cost.plans import names_engines
    from trainatomy.simulator.cudnn import installed_heuristics

    gpu = find_gpu(gpu_id)
    heuristics = installed_heuristics(gpu)
    if heuristics is None or not names_engines(heuristics.version, gpu.capability):
        raise SystemExit('stored predictions need cuDNN\'s library: pip install "trainatomy[cudnn]"')
    path = predictions_of(gpu_id)
    path.parent.mkdir(exist_ok=True)
    if again:
        kept = [line for line in lines(path) if names and line["name"] not in names.split(",")]
        path.write_text("".join(map(_text, kept)), encoding="utf-8")
    done = {line["name"]: line["workload"] for line in lines(path)}
    for row in sorted(rows(), key=lambda row: "factory" in row.mapping["model"]):  # torchvision_path.py says why
        if done.get(row.name) == dict(row.mapping) or (names and row.name not in names.split(",")):
            continue
        began = time.monotonic()
        try:
            found = prediction(row, gpu_id)
        except Exception as error:
            print(f"{row.name}: NOT PREDICTED: {type(error).__name__}: {error}", flush=True)
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(_text(found))
        times = f"{found['gpu_seconds'] * 1e3:.2f} {found['step_seconds'] * 1e3:.2f} ms {found['bound_by']}"
        print(f"{row.name}: {times} in {time.monotonic() - began:.1f} s", flush=True)


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def main() -> int:
    """Predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("--gpu", default="h200")
    predicting.add_argument("--names", default="")
    predicting.add_argument("--again", action="store_true", help="replace stored predictions")
    options = parser.parse_args()
    predict(options.gpu, options.names, options.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
