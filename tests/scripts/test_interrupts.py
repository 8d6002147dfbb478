"""Ctrl-C and crashes of a script's process: what ran until then is reported, and where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainatomy.scripts.launch import crashed_at

SCRIPT = """
import ctypes, sys, time, torch
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    model(torch.ones(4, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if "crash" in sys.argv:
    ctypes.string_at(8, 4)
open("waits", "w").close()
print("it waits", flush=True)
time.sleep(60)
"""
INTERRUPTED = 130


@pytest.fixture
def started(tmp_path: Path) -> subprocess.Popen[str]:
    """Start ``trainatomy run`` in a group of processes of its own, as a terminal does."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trainatomy", "run", "--gpu", "t4", "--json", "train.py"]
    return subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.slow
def test_an_interrupt_gives_the_bill_of_what_ran(started: subprocess.Popen[str]) -> None:
    assert started.stderr is not None
    assert any("it waits" in line for line in iter(started.stderr.readline, ""))
    os.killpg(started.pid, signal.SIGINT)
    printed, errors = started.communicate(timeout=60)
    script = json.loads(printed)["script"]
    assert (script["ending"], script["steps"], script["place"]) == ("interrupted", 2, "train.py:13")
    assert (started.returncode, errors.splitlines()[-1]) == (INTERRUPTED, "interrupted")


@pytest.mark.slow
def test_an_interrupt_while_libraries_are_imported_ends_at_once(started: subprocess.Popen[str]) -> None:
    time.sleep(1.5)
    os.killpg(started.pid, signal.SIGINT)
    _, errors = started.communicate(timeout=20)
    assert started.returncode == INTERRUPTED
    assert "interrupted" in errors


@pytest.mark.slow
def test_a_crash_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trainatomy", "run", "--gpu", "t4", "train.py", "crash"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "train.py crashed at train.py:10 (SIGSEGV)" in done.stderr


def test_the_line_of_a_crash_is_the_users(tmp_path: Path) -> None:
    text = f"""Fatal Python error: Segmentation fault

Current thread 0x1 (most recent call first):
  File "{os.__file__}", line 9 in string_at
  File "{tmp_path}/train.py", line 31 in kernel
  File "{tmp_path}/train.py", line 40 in <module>
"""
    assert crashed_at(text) == "train.py:31"
    assert crashed_at("") == ""
