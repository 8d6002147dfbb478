"""A process killed at any moment loses no complete record and leaves no partial one."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainatomy.records.store import Store

WRITER = """
import sys
from dataclasses import replace
from trainatomy.records.store import Store
record = Store(sys.argv[1]).read("3da90a10")
store = Store(sys.argv[2])
for count in range(100_000):
    each = replace(record, id=f"20261121-{count:09d}-3da9{sys.argv[3]}", command="x" * 300_000)
    store.write(each)
    print(each.id, flush=True)
"""


@pytest.mark.parametrize("patience", [0.0, 0.013, 0.05])
def test_two_writers_killed_at_work(tmp_path: Path, patience: float) -> None:
    data = str(Path(__file__).parent / "data")
    command = [sys.executable, "-c", WRITER, data, str(tmp_path)]
    writers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("000a", "000b")]
    reported: list[str] = []
    for writer in writers:
        assert writer.stdout is not None
        reported.append(writer.stdout.readline().strip())
    time.sleep(patience)
    for writer in writers:
        writer.kill()
    for writer in writers:
        rest, _ = writer.communicate()
        reported += [line for line in rest.split("\n")[:-1] if line]
        assert writer.returncode == -signal.SIGKILL
    history = Store(tmp_path).history()
    assert history.skipped == ()
    assert set(reported) <= {row.id for row in history.records}
    assert len(reported) >= 2
    assert all(len(Store(tmp_path).read(row.id).command) == 300_000 for row in history.records[-3:])


DIES = """
import os, signal, sys
from pathlib import Path
from trainatomy.records.store import Store

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

class HalfOnly:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        die()

source, folder, moment = sys.argv[1:]
record = Store(source).read("c6fa0a12")
opened, replaced, synced = Path.open, Path.replace, os.fsync
if moment == "half written":
    Path.open = lambda path, mode: HalfOnly(opened(path, mode))
if moment == "not on the disk yet":
    os.fsync = die
if moment == "not renamed yet":
    Path.replace = die
if moment == "renamed":
    Path.replace = lambda path, target: (replaced(path, target), die())
Store(folder).write(record)
"""


@pytest.mark.parametrize(
    ("moment", "found"),
    [("half written", 1), ("not on the disk yet", 1), ("not renamed yet", 1), ("renamed", 2), ("never", 2)],
)
def test_killed_at_every_step_of_writing(tmp_path: Path, moment: str, found: int) -> None:
    data = Path(__file__).parent / "data"
    Store(tmp_path).write(Store(data).read("3da90a10"))
    ran = subprocess.run([sys.executable, "-c", DIES, str(data), str(tmp_path), moment], check=False)
    assert ran.returncode == (0 if moment == "never" else -signal.SIGKILL)
    history = Store(tmp_path).history()
    assert (len(history.records), history.skipped) == (found, ())
    Store(tmp_path).write(Store(data).read("c6fa0a12"))  # files left behind by the kill do not interfere
    assert len(Store(tmp_path).list()) == 2
