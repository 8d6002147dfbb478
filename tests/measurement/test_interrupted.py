"""Measurements that a signal or a limit ends: what was measured until then is shown and on record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from measured import RESULT

from trainatomy.measurement.process.job import to_plain

SERVER = f"""
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    if "function" not in message: continue
    about = {{"task": message["task"], "rank": 0}}
    if json.loads(message["arguments"]["job"])["record"]:
        print(json.dumps({{**about, "progress": {{"run": "recorded", "stage": "training"}}}}), flush=True)
        time.sleep(60)
    for content in ({{"result": {to_plain(RESULT)!r}}}, {{"ended": 0, "stopped": False, "log": ""}}):
        print(json.dumps({{**about, **content}}), flush=True)
"""
"""A server whose recorded runs never end."""
COMMAND = f"""
import sys
from measured import called_here
from trainatomy.api import predicting
from trainatomy.cli import exits, main
from trainatomy.errors import SimulationError
from trainatomy.measurement import measure
from trainatomy.measurement.process import pool
from trainatomy.runs import single

def refuse(*_, **__):
    raise SimulationError("not here")

predicting.predict = refuse
pool.Processes.call = called_here
measure.require_gpu = lambda: "NVIDIA H200"
single.this_machine = lambda: single.Machine(("NVIDIA H200",), "580")
pool.SERVER = (sys.executable, "-c", {SERVER!r})
pool._EXIT_SECONDS = 0.2
exits.listen()
exits.end(main(sys.argv[1:]), silently=False)
"""
WORKLOAD = "model: {class: GPT2LMHeadModel, config: {n_layer: 1, n_embd: 8, n_head: 2}}\ndata: {sequence_length: 8}\n"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Return a command that measures on a machine with a fake GPU."""
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "command.py").write_text(COMMAND)
    return [sys.executable, "command.py"]


def start(command: list[str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    return subprocess.Popen(
        [*command, *arguments, "--records", "records", "--json"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in (folder / "records").glob("*.json")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("arguments", [("measure", "w.yaml"), ("compare", "w.yaml", "--measure")])
def test_a_signal_leaves_the_timed_run(
    command: list[str], tmp_path: Path, number: int, arguments: tuple[str, ...]
) -> None:
    with start(command, tmp_path, *arguments) as process:
        assert process.stderr is not None and process.stdout is not None
        while "recorded run: training" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(number)
        shown = json.loads(process.stdout.read())
        assert process.wait() == 128 + number
    measured = shown if arguments[0] == "measure" else shown["rows"][0]["measurements"][0]
    assert measured["step_seconds"] == RESULT.step_seconds
    (record,) = records(tmp_path)
    assert record["measurement"]["notes"] == ["the recorded run was interrupted, so there is no memory breakdown"]


def test_a_time_limit_leaves_the_timed_run(command: list[str], tmp_path: Path) -> None:
    process = start(command, tmp_path, "measure", "w.yaml", "--time-limit", "5")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert json.loads(out)["step_seconds"] == RESULT.step_seconds
    assert "did not end within 5 s" in err
    assert len(records(tmp_path)) == 1
