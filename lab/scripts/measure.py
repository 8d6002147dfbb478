"""Run scripts on this machine's GPU, beside predictions that were stored before, and write a line of JSON for each.

``measure.py --predict`` (no GPU) stores the predictions in ``predicted.json``; ``measure.py --folder FOLDER --out
FILE`` measures. FOLDER holds the scripts as ``run.py`` fetched them; scripts written here are in ``own/``. With
``--variants`` both do so for the same scripts with other arguments, ``variants.yaml``, and with ``--trials`` for those
of ``trials.yaml``, whose predictions are in ``trials-predicted.json``; with ``--compiled`` for scripts that compile
their model, ``compiled.yaml``; with ``--users`` for scripts as users write them, ``users.yaml``, whose predictions are
in ``users-predicted.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from run import BUILD, HERE, fetch, prepare

from trainatomy.scripts.command import read_command
from trainatomy.scripts.launch import started_by, visible_gpus

PREDICTED = HERE / "predicted.json"
TRIALS = HERE / "trials-predicted.json"
USERS = HERE / "users-predicted.json"
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
    parser.add_argument("--variants", action="store_true", help="the scripts of variants.yaml")
    parser.add_argument("--trials", action="store_true", help="the scripts of trials.yaml")
    parser.add_argument("--compiled", action="store_true", help="the scripts of compiled.yaml")
    parser.add_argument("--users", action="store_true", help="the scripts of users.yaml")
    parser.add_argument("--gpu", default=GPU)
    parser.add_argument("--limit", type=int, default=60, help="seconds that a script may take")
    parser.add_argument("--one", help="measure this command in this process")
    parser.add_argument("--mirror", type=Path)
    parser.add_argument("--folder", type=Path, default=BUILD)
    parser.add_argument("--out", type=Path, default=Path("run.jsonl"))
    parser.add_argument("--seconds", type=float, default=190.0)
    given = parser.parse_args()
    began = time.monotonic()
    if given.one:
        measure_one(given.one, given.gpu)
    stored = TRIALS if given.trials else USERS if given.users else PREDICTED
    known: dict[str, Any] = json.loads(stored.read_text()) if stored.is_file() else {}
    lists = {
        "trials.yaml": given.trials,
        "compiled.yaml": given.compiled,
        "users.yaml": given.users,
        "variants.yaml": given.variants,
    }
    other = next((HERE / name for name, is_wanted in lists.items() if is_wanted), None)
    found = commands(given.folder.resolve(), given.mirror, fetches=given.predict and other is None)
    if other is not None:
        found = variants(found, other)
    for name, (folder, command) in found.items():
        if given.names and name not in given.names.split(","):
            continue
        key = f"{name} on {given.gpu}" if given.trials else name
        if given.predict:
            known[key] = predicted(folder, command, given.gpu)
            stored.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
            print(key, known[key], flush=True)
        elif time.monotonic() - began < given.seconds:
            line = {"name": name, "predicted": known.get(key), **measured(folder, command, given.gpu, given.limit)}
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


def variants(found: dict[str, tuple[Path, str]], file: Path) -> dict[str, tuple[Path, str]]:
    """Return the folder and the command of each script of a file."""
    listed = yaml.safe_load(file.read_text())
    return {
        name: (found[entry["of"]][0] if "of" in entry else HERE, entry["run"].strip()) for name, entry in listed.items()
    }


def predicted(folder: Path, command: str, gpu: str = GPU) -> dict[str, Any]:
    """Predict a script with the release that is measured."""
    words = [
        sys.executable,
        "-m",
        "trainatomy",
        "run",
        "--gpu",
        gpu,
        "--torch",
        TORCH,
        "--json",
        "--no-look-ahead",
        *shlex.split(command),
    ]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if not done.stdout.startswith("{"):
        return {"error": done.stderr[-400:]}
    said = json.loads(done.stdout)
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    found = {key: said["memory"][key] for key in keys}
    if plans := said["memory"].get("plans"):
        found["plans"] = plans
    return {**found, "steps": said["script"]["steps"], "step_seconds": said["time"] and said["time"]["step_seconds"]}


def measured(folder: Path, command: str, gpu: str, limit: int) -> dict[str, Any]:
    """Measure a script in processes of its own, as `run --measure` starts them."""
    began = time.monotonic()
    read = read_command(shlex.split(command))
    words = [*started_by(read), str(Path(__file__).resolve()), "--gpu", gpu, "--one", command]
    seen = visible_gpus(read, os.environ)
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=limit, env=seen)
    except subprocess.TimeoutExpired:
        return {"error": f"{limit} s are over"}
    taken = round(time.monotonic() - began, 1)
    line = next((one for one in done.stdout.splitlines() if one.startswith(_RESULT)), None)
    if line is None:
        return {"error": done.stderr[-600:], "taken": taken}
    return {"measured": json.loads(line.removeprefix(_RESULT)), "taken": taken}


def measure_one(command: str, gpu: str) -> None:
    """Measure a script in this process, and print the result as a line of JSON."""
    from trainatomy.integrations.measured_script import measure_here
    from trainatomy.scripts.job import Job

    found = measure_here(Job(read_command(shlex.split(command)), (gpu,)))
    print("\n" + _RESULT + json.dumps({key: getattr(found, key) for key in _KEYS}), flush=True)
    os._exit(0)  # without waiting for workers of a loader that was left in the middle


_RESULT = "RESULT "
_KEYS = (
    "status", "gpu", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "steps", "timed_step_seconds",
    "message", "versions",
)  # fmt: skip


if __name__ == "__main__":
    main()
