"""Compare forms of the probe of the host's pace beside small trainings that a seed draws (``host_cases.py``).

python benchmarks/timing/pace_forms.py --out FILE.jsonl [--time-limit 60]   # on a GPU that nothing else uses
python benchmarks/timing/pace_forms.py --report records/pace-forms-h200.jsonl.gz

After each step, every form is timed: the probe's two parts with and without what warms them up, a small network that
runs once, launches of kernels, the same operation on the CPU, Python alone, and reads of far memory.  The report says
how each form's time and the time of the steps around it change together, within each training.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path
from random import Random
from statistics import correlation, fmean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import host_cases  # noqa: E402
import host_drawn  # noqa: E402
import processes  # noqa: E402
import trainings  # noqa: E402

SEED = 79
COUNTS = {"plain": 7, "windows": 6, "quantised": 3, "checkpointing": 2}
STEPS = 16
COLD, WARM, WORDS, READ = 6, 24, 2**23, 10_000
FAR = 0.4
"""Logarithm of a step's time beside its training's mean above which it is a stall."""


class Forms:
    """Times each form once."""

    def __init__(self) -> None:
        import numpy
        import torch
        from torch import nn

        self.layers = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.tokens = torch.tensor([[1, 2, 3]])
        self.here = {device: torch.zeros(4, device=device) for device in ("cuda", "cpu")}
        self.memory = numpy.zeros(WORDS, dtype=numpy.int64)
        self.places = numpy.random.default_rng(0).integers(0, WORDS, READ)

    def read(self) -> dict[str, float]:
        """Return the microseconds of every form."""
        import torch

        from trainatomy.measurement.device import host_probe

        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            found = {"network": self._us(lambda: self.layers(self.tokens).square().mean().backward())}
            found |= {"main_cold": self._us(host_probe._work), "main_warm": self._us(host_probe._work)}
            found["visit_warm"] = 1e6 * host_probe._visit()[0]
        for name, device in (("launches", "cuda"), ("cpu_operations", "cpu")):
            self._add(device, COLD)
            found[name] = self._us(partial(self._add, device, WARM))
        found["python"] = self._us(lambda: [(str(n), {n: len(str(n))}) for n in range(400)])
        found["far_memory"] = self._us(lambda: self.memory[self.places].sum())
        return {name: round(us, 1) for name, us in found.items()}

    def _add(self, device: str, count: int) -> None:
        import torch

        for _ in range(count):
            torch.add(self.here[device], self.here[device], out=self.here[device])

    @staticmethod
    def _us(function: Callable[[], Any]) -> float:
        began = time.perf_counter()
        function()
        return 1e6 * (time.perf_counter() - began)


class Watch(host_drawn.Watch):
    """Reads the forms after each step, too."""

    def __init__(self, forms: Forms) -> None:
        super().__init__(evaluates=False)
        self.forms, self.readings = forms, list[dict[str, float]]()

    def step_end(self, step: int) -> None:
        super().step_end(step)
        self.readings.append(self.forms.read())
        self._now = [("after_step", time.perf_counter())]


def cases() -> list[tuple[str, Mapping[str, Any]]]:
    """Return the drawn trainings."""
    return [
        (f"{kind}.{number}", host_cases.KINDS[kind][0](Random(f"{SEED} {kind} {number}")))
        for kind, count in COUNTS.items()
        for number in range(count)
    ]


def measure(out: Path, time_limit: float) -> None:
    """Measure all cases in this process; each is a line at once."""
    import torch

    from trainatomy.measurement.step.timer import EnoughSteps
    from trainatomy.training.model import build_model
    from trainatomy.training.quantization import load_on_device
    from trainatomy.training.run import run
    from trainatomy.workload.schema import Workload

    began, forms = time.monotonic(), Forms()
    for name, mapping in cases():
        if time.monotonic() - began > time_limit:
            break
        workload = Workload.from_mapping({**mapping, "name": "forms", "gpu": "h200"})
        warm_up = host_drawn.FP16_WARM_UP if workload.train.fp16 else host_drawn.WARM_UP
        watch = Watch(forms)
        model = load_on_device(workload, build_model(workload), "cuda")
        with suppress(EnoughSteps):
            run(workload, model, device="cuda", steps=warm_up + STEPS, observer=watch)
        spent = [host_drawn.between(step)[0] for step in watch.steps[warm_up:]]
        names = dict.fromkeys(one for us in spent for one in us)
        readings = watch.readings[warm_up - 1 :]
        line: dict[str, Any] = {"name": f"forms.{name}", "gpu": torch.cuda.get_device_name(), "mapping": mapping}
        line["us"] = {one: [round(us.get(one, 0.0), 1) for us in spent] for one in names}
        line["steps"] = [round(sum(us.values()), 1) for us in spent]
        line["readings"] = {form: [one[form] for one in readings] for form in readings[0]}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


def report(path: Path) -> None:
    """Print the correlation of each form with the steps around its readings."""
    changes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in trainings.lines(path):
        steps = [log(step) for step in line["steps"]]
        for form, readings in line["readings"].items():
            around = [log((before + after) / 2) for before, after in pairwise(readings)]
            pairs = zip(around, steps, strict=True)
            near = [(one - fmean(around), step - fmean(steps)) for one, step in pairs]
            changes[form] += [pair for pair in near if abs(pair[1]) < FAR]
    for form, pairs_of_form in changes.items():
        print(f"{form:16} {len(pairs_of_form)} steps, correlation {correlation(*zip(*pairs_of_form, strict=True)):.2f}")


def main() -> int:
    """Measure in a fork, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--time-limit", type=float, default=60)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.report:
        report(options.report)
        return 0
    processes.preload_for_forks()
    log_file = options.out.with_suffix(".log")
    process = processes.fork_and_run(partial(measure, options.out, options.time_limit), log_file)
    while process.status() is None:
        time.sleep(0.05)
    print(log_file.read_text(encoding="utf-8", errors="replace")[-9000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
