"""Ctrl-C and crashes of a script's process: what ran until then is reported, and where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainatomy.errors import SimulationError
from trainatomy.scripts import launch
from trainatomy.scripts import launch as supervision
from trainatomy.scripts.command import Command
from trainatomy.scripts.job import Job
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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("send", [os.kill, os.killpg])  # to the command alone, or to its group, as a terminal does
def test_an_interrupt_gives_the_bill_of_what_ran(started: subprocess.Popen[str], number: int, send: Any) -> None:
    assert started.stderr is not None
    assert any("it waits" in line for line in iter(started.stderr.readline, ""))
    send(started.pid, number)
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
def test_the_script_ends_with_a_killed_command(started: subprocess.Popen[str]) -> None:
    assert started.stderr is not None
    assert any("it waits" in line for line in iter(started.stderr.readline, ""))
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(started.pid)], capture_output=True, text=True, check=True
    )
    (child,) = map(int, children.stdout.split())
    started.kill()
    started.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Return whether a process has not ended; one that nobody waits for stays as a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


def test_without_a_line_of_the_user_it_is_that_of_a_library() -> None:
    text = f"""Current thread 0x1 (most recent call first):
  File "{threading.__file__}", line 9 in wait
  File "{pytest.__path__[0]}/../filelock/_api.py", line 31 in acquire
  File "<frozen runpy>", line 88 in _run_code
"""
    assert crashed_at(text) == "filelock/_api.py:31"
    assert crashed_at("\n".join(text.splitlines()[:2])) == f"{Path(threading.__file__).parent.name}/threading.py:9"


@pytest.mark.parametrize(
    ("code", "message", "exit_code"),
    [
        (-signal.SIGSEGV, "crashed (SIGSEGV): compiled code", SimulationError.exit_code),
        (-signal.SIGTERM, "was ended by a signal (SIGTERM)", SimulationError.exit_code),
        (-signal.SIGINT, "was interrupted", INTERRUPTED),
        (-signal.SIGKILL, "was killed: probably this machine is out of memory", SimulationError.exit_code),
    ],
)
def test_the_end_of_a_process_that_reported_nothing(tmp_path: Path, code: int, message: str, exit_code: int) -> None:
    job = Job(Command(("train.py",), "train.py", False, ()), ("t4",))
    found = launch._outcome(job, str(tmp_path), "t4", code)
    assert found.message.startswith(f"train.py {message}")
    assert found.exit_code == exit_code


def test_a_process_is_asked_before_it_is_killed_and_a_second_interrupt_ends_it() -> None:
    waits = [
        sys.executable,
        "-S",
        "-c",
        "import signal, time\nsignal.signal(2, lambda *_: None)\nprint(1)\nwhile 1: time.sleep(9)",
    ]
    process = supervision.start(waits, subprocess.DEVNULL, os.environ)
    asked: list[int] = []
    assert supervision.wait(process, 0.3, ask=lambda: asked.append(1), answers_in=0.1) is None
    assert asked == [1] and process.poll() == -signal.SIGKILL

    read, write = os.pipe()
    process = supervision.start(waits, write, os.environ)
    os.read(read, 1)
    timer = threading.Thread(target=_interrupt_twice)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        supervision.wait(process, 60, ask=lambda: None, answers_in=0.1)
    timer.join()
    assert process.wait(10) == -signal.SIGKILL


def _interrupt_twice() -> None:
    for _ in range(2):
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupt_waits_until_a_process_listens() -> None:
    code = (
        "import signal, time\nfrom trainatomy.scripts.launch import listen\n"
        "signal.signal(signal.SIGINT, lambda *_: exit(7))\ntime.sleep(0.2)\nlisten()\ntime.sleep(20)"
    )
    with supervision.held_interrupts():
        process = supervision.start([sys.executable, "-c", code], subprocess.DEVNULL, os.environ)
    supervision.send(process, signal.SIGINT)
    assert process.wait(20) == 7
