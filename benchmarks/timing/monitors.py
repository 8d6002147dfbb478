"""Check on a GPU what watching a run costs and how exact it is: ``python benchmarks/timing/monitors.py --out FILE``.

Each line of FILE is one result, with its ``case``:

cost       the same training with nothing watched, the power sampler, the probe of the host's pace, and everything, in
           turns: seconds of a step by CUDA events and by the clock on the wall
pace       a step that the CPU bounds, on this machine as it is, and with a spinning process on half of the processors
           and on all, in turns: its time and the probe's.  ``--predict`` stores the predictions at such paces first
probe      200 times of the probe, back to back
energy     the integral of the sampled power and the GPU's energy counter over the same seconds; how often the counter
           moves; the time of each of NVML's functions
data       a loader that takes 30 ms a batch: waiting as measured, and how much longer the steps took than without it
host       what ``trainatomy calibrate`` measures of this CPU, with the time of the probe between its steps
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from trainatomy.workload.schema import Workload

PREDICTED = Path(__file__).parent / "records" / "monitors-predicted.json"
PACES = (0.5, 0.75, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
HOST_BOUND: dict[str, Any] = {
    "name": "host-bound",
    "gpu": "h200",
    "loop": "pytorch",
    "model": {"class": "GPT2LMHeadModel", "config": {"n_layer": 6, "n_embd": 256, "n_head": 4, "vocab_size": 1000}},
    "data": {"sequence_length": 32},
    "train": {"per_device_train_batch_size": 2, "bf16": True, "max_grad_norm": 0.0},
}
GPU_BOUND: dict[str, Any] = {
    "name": "gpu-bound",
    "gpu": "h200",
    "loop": "pytorch",
    "model": {"class": "GPT2LMHeadModel", "config": {"n_layer": 8, "n_embd": 2048, "n_head": 16, "vocab_size": 8192}},
    "data": {"sequence_length": 512},
    "train": {"per_device_train_batch_size": 16, "bf16": True, "max_grad_norm": 0.0},
}
STEPS = {"host-bound": 60, "gpu-bound": 12}
ROUNDS = 2
LOADER_SECONDS = 0.03


class Lines:
    """The file of results; an error in one case stops no other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def run(self, case: str, measure: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """Write the results of a case."""
        began = time.perf_counter()
        try:
            for found in measure():
                self._write({"case": case, **found})
        except Exception:
            self._write({"case": case, "error": traceback.format_exc().splitlines()[-4:]})
        print(f"{case}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)

    def _write(self, content: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


class Training:
    """A training whose model stays on the GPU, to be run in blocks with different things watched."""

    def __init__(self, mapping: dict[str, Any]) -> None:
        from trainatomy.training.model import build_model

        self.workload = Workload.from_mapping(mapping)
        self.name = self.workload.display_name
        self._model = build_model(self.workload).to("cuda")

    def block(self, watched: str = "", make_batch: Any = None) -> dict[str, Any]:
        """Run some steps and return their times and what was watched: power, probe, data, all or nothing."""
        import torch

        from trainatomy.measurement.device.meter import Meter
        from trainatomy.measurement.step.timer import StepTimer
        from trainatomy.training.run import run

        monitors = self._monitors(watched)
        timer = StepTimer(Meter(None, is_exclusive=True), monitors=monitors)
        count = STEPS[self.name]
        steps = timer.warm_up + count
        run(self.workload, self._model, device="cuda", steps=steps, observer=timer, make_batch=make_batch)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - timer._timed_since) / count
        timer.finish()
        pace, wait = monitors.host_pace(), monitors.data_wait()
        power = monitors.power_use(self.workload.batch_size, None)
        return {
            "training": self.name,
            "watched": watched or "nothing",
            "step_seconds": timer.step_seconds,
            "wall_seconds": wall,
            "steps": list(timer.timed_seconds),
            "pace": None if pace is None else {**asdict(pace), "seconds": pace.seconds},
            "power": None if power is None else {**asdict(power), "samples": len(power.samples)},
            "watts": None if power is None else [[one.seconds, one.watts, one.clock_mhz] for one in power.samples],
            "data_wait": None if wait is None else asdict(wait),
        }

    def _monitors(self, watched: str) -> Any:
        from trainatomy.measurement.device.host_probe import HostProbe
        from trainatomy.measurement.device.power import sampler_of
        from trainatomy.measurement.step.data_wait import DataWaits
        from trainatomy.measurement.step.monitors import Monitors

        return Monitors(
            HostProbe() if watched in ("probe", "all") else None,
            DataWaits() if watched in ("data", "all") else None,
            sampler_of(GPUS[0]) if watched in ("power", "all") and GPUS else None,
        )


GPUS: list[Any] = []
"""The GPU as NVML knows it."""


def cost() -> Iterator[dict[str, Any]]:
    """Run each training with different things watched, in turns."""
    for mapping in (HOST_BOUND, GPU_BOUND):
        training = Training(mapping)
        training.block()
        for _ in range(ROUNDS):
            for watched in ("", "power", "probe", "all"):
                yield training.block(watched)


def probe() -> Iterator[dict[str, Any]]:
    """Take the probe's time many times."""
    from trainatomy.measurement.device.host_probe import probe_seconds

    yield {"seconds": [probe_seconds() for _ in range(200)]}


def pace() -> Iterator[dict[str, Any]]:
    """Run the step that the CPU bounds on a machine with and without other work, in turns."""
    training = Training(HOST_BOUND)
    training.block()
    for _ in range(ROUNDS):
        yield {"spinning": 0, **training.block("probe")}
        for share in (2, 1):
            with spinning((os.cpu_count() or 1) // share) as count:
                yield {"spinning": count, **training.block("probe")}


@contextmanager
def spinning(count: int) -> Iterator[int]:
    """Keep every processor busy with a process of its own."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    try:
        yield count
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


def _spin() -> None:
    while True:
        sum(range(10_000))


def energy() -> Iterator[dict[str, Any]]:
    """Compare sampled power with the energy counter while the GPU multiplies matrices, and time NVML's functions."""
    import torch

    from trainatomy.measurement.device.power import PowerSampler, read_limits

    gpu = GPUS[0]
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sampler = PowerSampler(gpu)
    before, began = gpu.binding.nvmlDeviceGetTotalEnergyConsumption(gpu.handle), time.perf_counter()
    sampler.start()
    while time.perf_counter() - began < 4.0:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    sampler.stop()
    after, ended = gpu.binding.nvmlDeviceGetTotalEnergyConsumption(gpu.handle), time.perf_counter()
    moves, last, until = [], 0, time.perf_counter() + 0.5
    while (now := time.perf_counter()) < until:
        if (value := gpu.binding.nvmlDeviceGetTotalEnergyConsumption(gpu.handle)) != last:
            moves.append(now)
            last = value
    yield {
        "seconds": ended - began,
        "counter_joules": (after - before) / 1000,
        "readings": [asdict(one) for one in sampler.readings],
        "reading_seconds": sampler.reading_seconds,
        "limits": asdict(read_limits(gpu)),
        "counter_moves": len(moves),
        "function_seconds": {name: _time_of(gpu, name) for name in FUNCTIONS},
    }


FUNCTIONS = {
    "nvmlDeviceGetPowerUsage": (),
    "nvmlDeviceGetTotalEnergyConsumption": (),
    "nvmlDeviceGetClockInfo": (1,),
    "nvmlDeviceGetTemperature": (0,),
    "nvmlDeviceGetCurrentClocksEventReasons": (),
}


def _time_of(gpu: Any, name: str) -> float | str:
    try:
        times = []
        for _ in range(50):
            began = time.perf_counter()
            getattr(gpu.binding, name)(gpu.handle, *FUNCTIONS[name])
            times.append(time.perf_counter() - began)
        return median(times)
    except Exception as error:
        return str(error)


def data() -> Iterator[dict[str, Any]]:
    """Train with a loader that takes time, and without."""
    import torch

    for mapping in (HOST_BOUND, GPU_BOUND):
        training = Training(mapping)
        length = training.workload.data.sequence_length or 1

        def batch(size: int, length: int = length, seconds: float = 0.0) -> dict[str, Any]:
            time.sleep(seconds)
            ids = torch.randint(1000, (size, length))
            return {"input_ids": ids, "labels": ids}

        def slow(size: int, make: Any = batch) -> dict[str, Any]:
            return dict(make(size, seconds=LOADER_SECONDS))

        training.block(make_batch=batch)
        for _ in range(2):
            yield {"loader_seconds": 0.0, **training.block("data", batch)}
            yield {"loader_seconds": LOADER_SECONDS, **training.block("data", slow)}


def host() -> Iterator[dict[str, Any]]:
    """Measure what a calibration measures of the CPU."""
    from trainatomy.measurement.calibration.host import JsonProcess

    with JsonProcess("phases") as process:
        yield process.get(60.0)


def predict() -> None:
    """Store the predictions that the results are compared with."""
    import trainatomy

    found = {}
    for mapping in (HOST_BOUND, GPU_BOUND):
        prediction = trainatomy.predict(Workload.from_mapping(mapping), host_paces=PACES)
        assert prediction.time is not None
        found[str(mapping["name"])] = asdict(prediction.time)
    PREDICTED.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


def main() -> int:
    """Predict or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("monitors.jsonl"), help="file of the results")
    parser.add_argument("--predict", action="store_true", help="store the predictions instead, without a GPU")
    options = parser.parse_args()
    if options.predict:
        predict()
        return 0
    lines = Lines(options.out)
    import torch

    from trainatomy.measurement.device import nvml

    with nvml.session() as driver:
        GPUS.append(driver.device(str(torch.cuda.get_device_properties(0).uuid)) or driver.gpus[0])
        for case in (probe, energy, data, pace, host, cost):
            lines.run(case.__name__, case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
