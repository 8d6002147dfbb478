"""Measure what first calls take: of convolutions with new shapes, and in the first evaluation of a training.

python benchmarks/timing/first_calls.py --out FILE   # on a GPU that nothing else uses: 40 s

A line per convolution has the milliseconds of the host for each call, in order: two trainings' steps, then batches
without gradients, some of them of a size that is new.  A line per training has the operators of its first and second
evaluation with the most time of their own, by the profiler.  Each runs in a process in which CUDA is new.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import processes  # noqa: E402

from trainatomy.training.observer import Silent  # noqa: E402

CONVOLUTIONS = {  # channels in and out, side of the filter, stride, groups, side of the image, padding
    "patches of 4": (3, 96, 4, 4, 1, 224, 0),
    "depthwise 7": (96, 96, 7, 1, 96, 56, 3),
    "depthwise 7, small": (384, 384, 7, 1, 384, 14, 3),
    "halving": (96, 192, 2, 2, 1, 56, 0),
    "3 x 3": (64, 64, 3, 1, 1, 28, 1),
    "3 x 3, stride": (128, 128, 3, 2, 1, 28, 1),
    "1 x 1": (256, 64, 1, 1, 1, 28, 0),
    "stem of 7": (3, 64, 7, 2, 1, 112, 3),
    "patches of 16": (3, 192, 16, 16, 1, 112, 0),
    "groups": (64, 64, 3, 1, 8, 28, 1),
    "depthwise 3": (64, 64, 3, 1, 64, 28, 1),
}
TYPES = (("bfloat16", False), ("bfloat16", True), ("float32", False), ("float16", False), ("float16", True))
"""Types, and whether the tensors are channels-last."""
TRAINED, EVALUATED = 4, (4, 8, 8, 16, 16, 11, 11, 32)
EVALUATIONS, STEPS, SHOWN = (3, 4), 6, 40
TRAININGS: dict[str, dict[str, Any]] = {
    "ConvNextForImageClassification": {"train": {"bf16": True}, "data": {}},
    "SwinForImageClassification": {"train": {"bf16": True}, "data": {}},
    "ResNetForImageClassification": {"train": {}, "data": {}},
    "MPNetForSequenceClassification": {"train": {"fp16": True}, "data": {"sequence_length": 256}},
}


def milliseconds(function: Callable[[], Any]) -> float:
    """Return the time that a call takes on the host when the GPU has nothing else to do."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    return round(1e3 * (time.perf_counter() - began), 3)


def convolutions() -> Iterator[dict[str, Any]]:
    """Yield the times of calls of convolutions."""
    import torch

    for dtype, last in TYPES:
        for name, (inputs, outputs, side, stride, groups, image, padding) in CONVOLUTIONS.items():
            layer = torch.nn.Conv2d(inputs, outputs, side, stride, padding, groups=groups)
            layout: Any = torch.channels_last if last else torch.contiguous_format
            layer = layer.to("cuda", getattr(torch, dtype))
            layer.weight.data = layer.weight.data.contiguous(memory_format=layout)

            def batch(size: int, layer: Any = layer, layout: Any = layout, image: int = image) -> Any:
                channels = layer.in_channels
                empty = torch.zeros(size, channels, image, image, device="cuda", dtype=layer.weight.dtype)
                return empty.to(memory_format=layout)

            trained, found = batch(TRAINED).requires_grad_(), list[tuple[str, float]]()
            for _ in range(2):
                found.append((f"training {TRAINED}", milliseconds(partial(layer, trained))))
                loss = layer(trained).sum()
                found.append((f"backward {TRAINED}", milliseconds(loss.backward)))
            with torch.no_grad():
                found += [(f"evaluation {size}", milliseconds(partial(layer, batch(size)))) for size in EVALUATED]
            yield {"name": name, "dtype": dtype, "channels_last": last, "ms": found}


class Evaluations(Silent):
    """Profiles two evaluations of a training."""

    def __init__(self) -> None:
        self.found: list[list[tuple[str, int, float]]] = []
        self._profiler: Any = None

    def evaluates_after(self, step: int) -> bool:
        return step in EVALUATIONS

    def evaluation_begin(self, batches: int) -> None:
        import torch

        torch.cuda.synchronize()
        kinds = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
        self._profiler.start()

    def evaluation_end(self) -> None:
        self._profiler.stop()
        every = sorted(self._profiler.key_averages(), key=lambda one: -one.self_cpu_time_total)
        self.found.append([(one.key, one.count, round(one.self_cpu_time_total / 1e3, 2)) for one in every[:SHOWN]])


def evaluations(name: str) -> dict[str, Any]:
    """Return the operators of the first and the second evaluation of a training."""
    import torch

    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.run import run
    from trainatomy.workload.schema import Workload

    described = TRAININGS[name]
    train = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "eval_strategy": "steps"}
    mapping = {"model": {"class": name}, "data": {"eval_samples": 24} | described["data"]}
    workload = Workload.from_mapping({**mapping, "train": train | described["train"], "name": name, "gpu": "h200"})
    with torch.device("cuda"):
        model = build_model(workload)
    watch = Evaluations()
    with suppress(EnoughSteps):
        run(workload, model, device="cuda", steps=STEPS, observer=watch)
    return {"name": name, "evaluations": watch.found}


def measure(out: Path, name: str) -> None:
    """Write the lines of a training, or of the convolutions if ``name`` is empty."""
    lines: Iterator[Mapping[str, Any]] = iter([evaluations(name)]) if name else convolutions()
    for line in lines:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> int:
    """Measure each training and the convolutions in a fork of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    processes.preload_for_forks()
    for name in (*TRAININGS, ""):
        log = options.out.with_suffix(".log")
        process = processes.fork_and_run(partial(measure, options.out, name), log)
        while process.status() is None:
            time.sleep(0.05)
        print(name or "convolutions", log.read_text(encoding="utf-8", errors="replace")[-2000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
