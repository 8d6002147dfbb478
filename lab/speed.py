"""Time the command line: ``python lab/speed.py [--runs 5]``.

Each command runs in its own process: wall-clock seconds, seconds of CPU time, and peak memory; the median of the runs
counts.  Limits are checked.

The cost of predicting time beside memory is measured in this process, with everything loaded: the least CPU time of
several predictions with and without it, alternating.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

GIB = 2**30
TRAINATOMY = (sys.executable, "-m", "trainatomy")
IMPORTS = "import torch; from transformers import BertForSequenceClassification"
LOADS_NEITHER = "import trainatomy, sys; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
LLAMA = """\
model: {id: meta-llama/Llama-3.1-405B, class: LlamaForCausalLM, dtype: bfloat16}
data: {sequence_length: 4096}
train: {per_device_train_batch_size: 1, optim: adamw_torch_fused}
gpu: {base: b200, memory_bytes: 8 TiB}
"""
BERT = (
    "predict --model google-bert/bert-large-uncased --model-class BertForSequenceClassification --sequence-length 512 "
    "--per-device-train-batch-size 4 --gpu h200"
)
MODELS: dict[str, dict[str, Any]] = {
    "BERT-large": {
        "model": {"id": "google-bert/bert-large-uncased", "class": "BertForSequenceClassification"},
        "data": {"sequence_length": 512},
        "train": {"per_device_train_batch_size": 4},
    },
    "BERT-large, accumulation over 4": {
        "model": {"id": "google-bert/bert-large-uncased", "class": "BertForSequenceClassification"},
        "data": {"sequence_length": 512},
        "train": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "fp16": True},
    },
    "Llama-3.1-8B, LoRA, checkpointing": {
        "model": {"id": "meta-llama/Llama-3.1-8B", "class": "LlamaForCausalLM", "dtype": "bfloat16", "lora": {"r": 16}},
        "data": {"sequence_length": 2048},
        "train": {"per_device_train_batch_size": 1, "gradient_checkpointing": True},
    },
    "ResNet-50, plain loop": {
        "model": {"class": "ResNetForImageClassification"},
        "train": {"per_device_train_batch_size": 32, "bf16": True},
        "loop": "pytorch",
    },
}
"""Workloads that are predicted with and without their time."""
TIME_ADDS = 0.25
"""Limit of that share."""
LEAST_ROUNDS = 7
"""Minimum number of rounds; with fewer, even the least of them may be that of a busy moment."""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one process: wall-clock seconds, seconds of CPU time, bytes of memory at most."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Timed:
    """A command and its runs."""

    name: str
    runs: Sequence[Run]

    def typical(self, of: Callable[[Run], float]) -> float:
        """Return the median over the runs."""
        return median(map(of, self.runs))


def run(command: Sequence[str]) -> Run:
    """Run a command to its end; raises ``SystemExit`` with its output where it fails."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said.read().decode()[-2000:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def commands(runs: int, large_runs: int) -> dict[str, Timed]:
    """Time every command; print a line of a table each."""
    print("| | seconds | spread | processor seconds | GiB | runs |\n|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "llama.yaml"
        workload.write_text(LLAMA, encoding="utf-8")
        return times(workload, runs, large_runs)


def times(workload: Path, runs: int, large_runs: int) -> dict[str, Timed]:
    """Run every command, after one run that fills the file caches."""
    commands = {
        "imports": ("import torch and BertForSequenceClassification", (sys.executable, "-c", IMPORTS), runs),
        "bert": ("trainatomy predict, BERT-large", (*TRAINATOMY, *BERT.split()), runs),
        "llama": ("trainatomy predict, Llama-3.1-405B", (*TRAINATOMY, "predict", str(workload)), large_runs),
        "help": ("trainatomy --help", (*TRAINATOMY, "--help"), runs),
        "import": ("import trainatomy", (sys.executable, "-c", LOADS_NEITHER), runs),
    }
    found: dict[str, Timed] = {}
    for key, (name, command, count) in commands.items():
        if key != "llama":
            run(command)
        found[key] = Timed(name, [run(command) for _ in range(count)])
        print(_row(found[key]), flush=True)
    return found


def limits(found: dict[str, Timed]) -> list[tuple[str, float, float]]:
    """Return the limits: name, value, limit."""
    bert, imports, llama = (found[key].typical(_seconds) for key in ("bert", "imports", "llama"))
    return [
        ("BERT-large, times the imports alone", bert / imports, 2.0),
        ("Llama-3.1-405B, seconds", llama, 30.0),
        ("Llama-3.1-405B, GiB of memory", found["llama"].typical(_peak) / GIB, 1.5),
        ("trainatomy --help, seconds", found["help"].typical(_seconds), 0.3),
    ]


def added_by_time(rounds: int) -> list[tuple[str, float, float]]:
    """Return the share that predicting time adds to predicting memory: name, value, limit; prints both."""
    from trainatomy import predict
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.timing.cost_model import cost_model_of
    from trainatomy.workload import Workload

    def seconds(workload: Workload, timed: bool) -> float:
        gc.collect()
        began = time.process_time()
        predict(workload, timed=timed)
        return time.process_time() - began

    began = time.process_time()
    cost_model_of(find_gpu("h200"))
    once = time.process_time() - began
    print(f"\nLoading kernel costs, once per process: {once:.2f} processor seconds.")
    print("\n| processor seconds, warm | memory | memory and time | added |\n|---|---:|---:|---:|")
    found = []
    for name, mapping in MODELS.items():
        workload = Workload.from_mapping({**mapping, "gpu": "h200"})
        predict(workload)
        rows = [[seconds(workload, timed) for timed in (False, True)] for _ in range(max(rounds, LEAST_ROUNDS))]
        memory, both = (min(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {memory:.2f} | {both:.2f} | {both / memory - 1:+.1%} |", flush=True)
        found.append((f"{name}: what time adds to memory", both / memory - 1, TIME_ADDS))
    return found


def _seconds(one: Run) -> float:
    return one.seconds


def _cpu(one: Run) -> float:
    return one.cpu_seconds


def _peak(one: Run) -> float:
    return one.peak_bytes


def _row(timed: Timed) -> str:
    spread = max(map(_seconds, timed.runs)) - min(map(_seconds, timed.runs))
    return (
        f"| {timed.name} | {timed.typical(_seconds):.2f} | {spread:.2f} | {timed.typical(_cpu):.2f} "
        f"| {timed.typical(_peak) / GIB:.2f} | {len(timed.runs)} |"
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} processors"


def main() -> int:
    """Print the tables; return 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each command (default: 5)")
    parser.add_argument("--large-runs", type=int, default=3, help="runs of Llama-3.1-405B (default: 3)")
    parser.add_argument("--time-only", action="store_true", help="measure what time adds to memory, nothing else")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    print(f"{_processor()}; Python {platform.python_version()}, {versions}; {time.strftime('%Y-%m-%d')}\n")
    reached = [] if options.time_only else limits(commands(options.runs, options.large_runs))
    reached += added_by_time(options.runs)
    print("\n| | reached | limit | |\n|---|---:|---:|---|")
    for name, value, limit in reached:
        print(f"| {name} | {value:.2f} | {limit:g} | {'kept' if value <= limit else 'not kept'} |")
    return int(any(value > limit for _, value, limit in reached))


if __name__ == "__main__":
    sys.exit(main())
