"""Run scripts on this machine's GPU, beside predictions that were stored before, and write a line of JSON for each.

``measure.py --predict`` (no GPU) stores the predictions in ``predicted.json``; ``measure.py --folder FOLDER --out
FILE`` measures. FOLDER holds the scripts as ``run.py`` fetched them; scripts written here are in ``own/``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from run import BUILD, HERE, fetch, prepare

PREDICTED = HERE / "predicted.json"
GPU = "h200"
TORCH = "2.11"
"""The release on the machine that measures."""
OWN = {
    "own-plain": "own/plain.py",
    "own-trainer": "own/trainer.py",
    "own-trainer-checkpointing": "own/trainer.py --gradient_checkpointing",
    "own-accelerate": "own/accelerated.py",
    "own-gan": "own/gan.py",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--names")
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--folder", type=Path, default=BUILD)
    parser.add_argument("--out", type=Path, default=Path("run.jsonl"))
    parser.add_argument("--seconds", type=float, default=190.0)
    given = parser.parse_args()
    began = time.monotonic()
    if not given.predict:
        import_libraries()
    known: dict[str, Any] = json.loads(PREDICTED.read_text()) if PREDICTED.is_file() else {}
    for name, (folder, command) in commands(given.folder.resolve(), given.mirror, fetches=given.predict).items():
        if given.names and name not in given.names.split(","):
            continue
        if given.predict:
            known[name] = predicted(folder, command)
            PREDICTED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
            print(name, known[name], flush=True)
        elif time.monotonic() - began < given.seconds:
            line = {"name": name, "predicted": known.get(name), **measured(folder, command)}
            with given.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line)[:400], flush=True)


def commands(build: Path, mirror: Path | None, *, fetches: bool) -> dict[str, tuple[Path, str]]:
    """Return the folder and the command of each script."""
    listed = yaml.safe_load((HERE / "scripts.yaml").read_text())
    found: dict[str, tuple[Path, str]] = {}
    for name, entry in listed["scripts"].items():
        if not entry.get("gpu"):
            continue
        source = listed["repositories"][entry["from"]]
        if fetches:
            folder = fetch(entry, source, build, mirror)
        else:
            root = build / source["repo"].replace("/", "+")
            folder = root / entry.get("folder", ".")
            for path, kind in entry.get("prepare", {}).items():
                prepare(root / path, kind)
        found[name] = folder, entry["run"]
    return {**{name: (HERE, command) for name, command in OWN.items()}, **found}


def predicted(folder: Path, command: str) -> dict[str, Any]:
    """Predict a script with the release that is measured."""
    words = [sys.executable, "-m", "trainatomy", "run", "--gpu", GPU, "--torch", TORCH, "--json", *shlex.split(command)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if not done.stdout.startswith("{"):
        return {"error": done.stderr[-400:]}
    said = json.loads(done.stdout)
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    found = {key: said["memory"][key] for key in keys}
    return {**found, "steps": said["script"]["steps"], "step_seconds": said["time"] and said["time"]["step_seconds"]}


def measured(folder: Path, command: str, limit: int = 60) -> dict[str, Any]:
    """Measure a script in a fork of this process, which has imported the libraries and not touched CUDA."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result, output = Path(place, "result.json"), Path(place, "output.txt")
        if (pid := os.fork()) == 0:
            _measure(folder, command, result, output, limit)
        os.waitpid(pid, 0)
        taken = round(time.monotonic() - began, 1)
        if not result.is_file():
            return {"error": output.read_text(errors="replace")[-600:], "taken": taken}
        return {"measured": json.loads(result.read_text()), "taken": taken}


def _measure(folder: Path, command: str, result: Path, output: Path, limit: int) -> None:
    """Measure a script in this process, and end it."""
    from trainatomy.integrations.measured_script import measure_here
    from trainatomy.scripts.command import read_command
    from trainatomy.scripts.job import Job

    signal.alarm(limit)
    target = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, 1)
    os.dup2(target, 2)
    try:
        os.chdir(folder)
        found = measure_here(Job(read_command(shlex.split(command)), (GPU,)))
        result.write_text(json.dumps({key: getattr(found, key) for key in _KEYS}))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


_KEYS = (
    "status", "gpu", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "steps", "timed_step_seconds",
    "message", "versions",
)  # fmt: skip


def import_libraries() -> None:
    """Import what most scripts import, and nothing that initialises CUDA, which no fork could use then."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in ("torch", "torchvision.models", "torchvision.datasets"):
        with contextlib.suppress(Exception):
            import_module(name)


if __name__ == "__main__":
    main()
