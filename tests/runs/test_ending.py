"""How commands and their processes end: by signals at any moment, in one line, and with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainatomy.cli import exits

SOURCES = os.pathsep.join(map(os.path.abspath, sys.path))
TINY = """
model: {class: BertForSequenceClassification, config: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
data: {sequence_length: 16}
"""
POOL = """
import sys, time
from pathlib import Path
from trainatomy.runs import pools

pools.PRELOADED = ("trainatomy.runs.server",)

def begin():
    Path(f"begun-{time.time_ns()}").touch()

if __name__ == "__main__":
    with pools.process_pools([2], begin) as (pool,):
        list(pool.map(time.sleep, [60, 60]))
"""


def processes_of(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, own, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(own) == session and state != "Z":
                found.append(int(folder.name))
    return found


def nothing_is_left(session: int) -> bool:
    deadline = time.monotonic() + 5
    while processes_of(session):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Session:
    """Starts commands in sessions of their own; ends what a test leaves of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=self.folder, text=True, start_new_session=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCES},
        )  # fmt: skip
        self.started.append(process)
        return process


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(tmp_path)
    yield made
    for process in made.started:
        for left in processes_of(process.pid):
            os.kill(left, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_workers_end_with_the_process_that_started_them(session: Session, number: int) -> None:
    (session.folder / "pool.py").write_text(POOL)
    process = session.start("pool.py")
    deadline = time.monotonic() + 60
    while len(list(session.folder.glob("begun-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes_of(process.pid)) >= 4  # with the server and the tracker of resources
    process.send_signal(number)
    assert nothing_is_left(process.pid)


@pytest.mark.parametrize("seconds", [0.4, 1.0, 2.0, 3.5])
@pytest.mark.parametrize(
    ("command", "number", "to_all"),
    [
        (("predict", "tiny.yaml"), signal.SIGTERM, False),
        (("fit", "tiny.yaml"), signal.SIGINT, True),
        (("compare", "notebook", "--jobs", "2"), signal.SIGHUP, False),
    ],
)
def test_a_signal_at_any_moment_is_an_interruption(
    session: Session, command: tuple[str, ...], number: int, to_all: bool, seconds: float
) -> None:
    (session.folder / "tiny.yaml").write_text(TINY)
    process = session.start("-m", "trainatomy", *command)
    time.sleep(seconds)
    if to_all:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, log = process.communicate(timeout=30)
    assert nothing_is_left(process.pid)
    if process.returncode == -number:  # before the handlers are there, which may take a while on a busy machine
        assert log == ""
    elif process.returncode != 0:  # 0: it was quicker
        assert (process.returncode, log) == (128 + number, "interrupted\n")


SWALLOWED = """
import time
try:
    Path = None
    open("importing", "w").close()
    time.sleep(20)
except BaseException:
    time.sleep(20)
"""
IMPORTS = """
import sys
from trainatomy.cli import exits
exits.listen()
import swallowing
"""


def test_an_import_that_swallows_exceptions_swallows_no_signal(session: Session) -> None:
    (session.folder / "swallowing.py").write_text(SWALLOWED)
    (session.folder / "imports.py").write_text(IMPORTS)
    process = session.start("imports.py")
    while not (session.folder / "importing").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=10)
    assert (process.returncode, log) == (143, "interrupted\n")


@pytest.mark.parametrize("error", [AttributeError("half imported"), ValueError(), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_after_a_signal_is_its_consequence(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exits, "_received", [signal.SIGTERM])
    assert exits.report(error, debug=False) == 143
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_alone_has_its_usual_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.report(KeyboardInterrupt(), debug=False) == exits.explain_exit(130) == 130
    assert capsys.readouterr().err == "interrupted\n" * 2
