"""Run the doctor on a machine with a GPU, as it is and with causes that can be made without changing a setting.

``python benchmarks/doctor/causes.py FILE`` writes one JSON line for each case (about 10 s each): the finding that is
expected, those that were found, and all facts. Trainings are watched that wait for their data and that do not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

MULTIPLY = """
import torch, time
left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(20):
        left @ left
    torch.cuda.synchronize()
"""
WAIT_FOR_DATA = MULTIPLY.replace("    torch.cuda.synchronize()", "    torch.cuda.synchronize(); time.sleep(0.15)")
HOLD = "import torch, time; held = torch.ones(1 << 28, device='cuda'); time.sleep(600)"
SPIN = "while True: pass"
BROKEN = 'raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")'


class Case(NamedTuple):
    """A cause and the finding that it must have.

    Attributes:
        program: A Python program that runs meanwhile.
        programs: How many of them; 0: one for each processor.
        watch: Watch the program.
    """

    name: str
    expected: str = ""
    environment: Mapping[str, str] = MappingProxyType({})
    program: str = ""
    programs: int = 1
    watch: bool = False


CASES = (
    Case("as it is"),
    Case("variable", "environment", {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"}),
    Case("hidden", "cuda_fails", {"CUDA_VISIBLE_DEVICES": ""}),
    Case("broken extension", "extension_broken"),
    Case("in use", "gpu_in_use", program=HOLD),
    Case("busy host", "host_busy", program=SPIN, programs=0),
    Case("waits for data", "gpu_waits", program=WAIT_FOR_DATA, watch=True),
    Case("multiplies", "power_capped", program=MULTIPLY, watch=True),
    Case("on the CPU", "pid_not_found", program=SPIN, watch=True),
)


def main(file: Path) -> None:
    """Write each case as soon as it is done."""
    with file.open("w") as lines:
        for case in CASES:
            began = time.monotonic()
            try:
                found: dict[str, Any] = run(case)
            except Exception as error:  # the others go on
                found = {"error": f"{type(error).__name__}: {error}"}
            about = {"case": case.name, "expected": case.expected, "seconds": round(time.monotonic() - began, 1)}
            lines.write(json.dumps({**about, **found}) + "\n")
            lines.flush()
            names = [each["name"] for each in found.get("findings", [])]
            print(case.name, "expected", case.expected or "-", "found", names, found.get("error", ""), flush=True)


def run(case: Case) -> dict[str, Any]:
    """Look at the machine in a process of its own, with the cause."""
    with ExitStack() as stack:
        count = case.programs or os.cpu_count() or 1
        started = [stack.enter_context(running(case.program)) for _ in range(count)] if case.program else []
        if started and "cuda" in case.program:
            time.sleep(6.0)
        environment = {**os.environ, **case.environment}
        if case.name == "broken extension":
            environment["PYTHONPATH"] = f"{broken()}:{environment.get('PYTHONPATH', '')}"
        watched = [str(started[0].pid)] if case.watch else []
        command = [sys.executable, __file__, "--look", *watched]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    lines = done.stdout.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}
    return found


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the context ends."""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def broken() -> Path:
    """Install a package flash-attn that cannot be imported."""
    place = Path(tempfile.mkdtemp())
    (place / "flash_attn").mkdir(parents=True, exist_ok=True)
    (place / "flash_attn" / "__init__.py").write_text(BROKEN)
    (place / "flash_attn-2.8.3.dist-info").mkdir(exist_ok=True)
    (place / "flash_attn-2.8.3.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.8.3\n")
    return place


def look(pid: int | None) -> None:
    """Print one diagnosis as JSON."""
    from trainatomy.doctor.diagnosing import diagnose
    from trainatomy.doctor.gathering import gather
    from trainatomy.reporters.doctor_json import diagnosis_to_json

    diagnosis = diagnose(gather(seconds=3.0 if pid else 0.0, pid=pid))
    found = diagnosis_to_json(diagnosis)
    try:
        from trainatomy.reporters.text.doctor import doctor_page
        from trainatomy.reporters.text.rendering import render

        found["page"] = render(doctor_page(diagnosis))
    except ImportError as error:  # without rich
        found["page"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "--look":
        look(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    else:
        main(Path(sys.argv[1]))
