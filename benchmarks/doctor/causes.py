"""Run the doctor on a machine with GPUs, as it is and with causes that can be made without changing a setting.

``python benchmarks/doctor/causes.py FILE`` writes one JSON line for each case: the findings that are expected, those
that were found, and all facts. One process on GPU 0 holds memory, waits for its data and multiplies in turn, watched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.results.machine import MachineState

TRAINING = """
import sys, threading, time, torch
left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
phase = ["hold"]
threading.Thread(target=lambda: [phase.__setitem__(0, line.strip()) for line in sys.stdin], daemon=True).start()
torch.cuda.synchronize()
print("ready", flush=True)
while phase[0] != "end":
    if phase[0] != "hold":
        for _ in range(20):
            left @ left
        torch.cuda.synchronize()
    if phase[0] != "multiply":
        time.sleep(0.15)
"""
"""Multiplies matrices; in the phase ``wait`` it sleeps between them, as a training does that waits for its data."""

SPIN = "while True: pass"
BROKEN = 'raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")'


class Case(NamedTuple):
    """A cause in the environment, and the findings that it must have."""

    name: str
    expected: tuple[str, ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})


CASES = (
    Case("the machine as it is"),
    Case(
        "CUDA_LAUNCH_BLOCKING=1, NCCL_P2P_DISABLE=1, and a flash-attn that cannot be imported",
        ("environment", "extension_broken"),
        {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1", "PYTHONPATH": "{broken}"},
    ),
    Case("CUDA_VISIBLE_DEVICES hides all GPUs", ("cuda_fails", "environment"), {"CUDA_VISIBLE_DEVICES": ""}),
)


def main(file: Path) -> None:
    """Write each case as soon as it is done."""
    with file.open("w") as lines:
        for case in CASES:
            write(lines, case.name, case.expected, lambda case=case: look(case))
        with started("-c", TRAINING) as training:
            print("training:", training.stdout.readline().strip() if training.stdout else "", flush=True)
            for phase, name, expected in (
                ("hold", "another process holds memory of GPU 0", ("gpu_in_use",)),
                ("wait", "a training that waits for its data, watched", ("gpu_waits",)),
                ("multiply", "a training that multiplies large matrices, watched", ("power_capped",)),
            ):
                write(lines, name, expected, lambda phase=phase: beside(training, phase))
        with started("-c", SPIN) as process:
            write(lines, "a process without CUDA, watched", ("pid_not_found",), lambda: watched(process.pid))


def write(lines: IO[str], name: str, expected: tuple[str, ...], find: Callable[[], dict[str, Any]]) -> None:
    """Write one line, also for a case that fails."""
    began = time.monotonic()
    try:
        found = find()
    except Exception as error:  # the others go on
        found = {"error": f"{type(error).__name__}: {error}"[:2000]}
    names = [each["name"] for each in found.get("findings", [])]
    about = {"case": name, "expected": expected, "found": names, "seconds": round(time.monotonic() - began, 1)}
    lines.write(json.dumps({**about, **found}) + "\n")
    lines.flush()
    print(about, found.get("error", ""), flush=True)


def look(case: Case) -> dict[str, Any]:
    """Look at the machine in a process of its own, which has the case's environment."""
    more = {name: value.format(broken=broken()) for name, value in case.environment.items()}
    if "PYTHONPATH" in more:
        more["PYTHONPATH"] += f":{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, __file__, "--look"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **more}, check=False)
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}
    return found


def beside(training: subprocess.Popen[str], phase: str) -> dict[str, Any]:
    """Put the training into a phase and look at the driver, or watch the training."""
    if training.stdin:
        training.stdin.write(f"{phase}\n")
        training.stdin.flush()
    time.sleep(2.0)
    if phase != "hold":
        return watched(training.pid)
    from trainatomy.doctor.gpus import read_driver
    from trainatomy.results.machine import MachineState

    driver = read_driver()
    return described(MachineState(driver.gpus, driver.pairs))


def watched(pid: int) -> dict[str, Any]:
    """Watch a process for three seconds."""
    from trainatomy.doctor.gpus import read_driver
    from trainatomy.doctor.watching import watch
    from trainatomy.results.machine import MachineState

    return described(MachineState(read_driver().gpus, watched=watch(3.0, pid)))


def described(machine: MachineState) -> dict[str, Any]:
    """Return findings and facts as JSON, with the page where rich is installed."""
    from trainatomy.doctor.diagnosing import diagnose
    from trainatomy.reporters.doctor_json import diagnosis_to_json

    diagnosis = diagnose(machine)
    found = diagnosis_to_json(diagnosis)
    try:
        from trainatomy.reporters.text.doctor import doctor_page
        from trainatomy.reporters.text.rendering import render

        found["page"] = render(doctor_page(diagnosis))
    except ImportError as error:
        found["page"] = str(error)
    return found


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python until the context ends."""
    process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def broken() -> Path:
    """Install a package flash-attn that cannot be imported, in a folder of its own."""
    place = Path(tempfile.mkdtemp())
    (place / "flash_attn").mkdir()
    (place / "flash_attn" / "__init__.py").write_text(BROKEN)
    (place / "flash_attn-2.8.3.dist-info").mkdir()
    (place / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.8.3\n")
    return place


if __name__ == "__main__":
    if sys.argv[1] == "--look":
        from trainatomy.doctor.gathering import gather

        print(json.dumps(described(gather())))
    else:
        main(Path(sys.argv[1]))
