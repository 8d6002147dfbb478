"""Measure a training: run it on this machine's GPU, in a fresh process, and read the result.

A fresh process, because what ran before leaves memory behind: a context, loaded kernels, library workspaces, cached
segments.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.gpu import nvml
from trainatomy.gpu.job import DEFAULT_STEPS, Stacks, read_result, set_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainatomy.results.bill import Measurement
    from trainatomy.workload.schema import Workload

LOG_LINES = 12
WITHOUT_GPU = "`trainatomy predict` needs no GPU."


def measure(
    workload: Workload,
    *,
    tape: Path | str | None = None,
    stacks: Stacks = "none",
    steps: int = DEFAULT_STEPS,
    time_limit: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Run ``workload`` on the GPU of this machine and return what it took; out of memory is a result, not an error.

    ``steps``: optimizer steps where the workload does not say; ``tape``: a file for the stream of allocations, with
    ``stacks`` if wanted; ``time_limit``: seconds; ``progress``: is told what happens, one line at a time (default:
    prints to stderr).

    Raises ``DeviceError`` where there is no GPU or the process died, and whatever error the workload itself causes.
    """
    say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
    say(f"measuring {workload.name or 'the workload'} on {require_gpu()}")
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        description, result = Path(folder, "workload.json"), Path(folder, "result.json")
        description.write_text(json.dumps(workload.to_mapping()), encoding="utf-8")
        options = ["--steps", str(steps), "--stacks", stacks] + (["--tape", str(Path(tape).absolute())] if tape else [])
        command = [sys.executable, "-m", "trainatomy.gpu.worker", str(description), str(result), *options]
        return run_worker(command, result, Path(folder, "log"), workload.allocator, time_limit)


def require_gpu() -> str:
    """The name of a GPU that a child process can use.

    Raises ``DeviceError`` at once where there is none.  Without NVML's binding the worker has to find out.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        raise DeviceError(f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU from this process. {WITHOUT_GPU}")
    try:
        with nvml.session() as driver:
            return ", ".join(sorted({card.name for card in driver.cards})) + f" (driver {driver.version})"
    except MissingLibrary:
        if _has_driver():
            return "this machine's GPU"
        raise DeviceError(
            f"No NVIDIA driver is installed on this machine (no libcuda); measuring needs one and a GPU. {WITHOUT_GPU}"
        ) from None
    except DeviceError as error:
        raise DeviceError(f"{error} Measuring runs the training on a GPU; {WITHOUT_GPU}") from None


def _has_driver() -> bool:
    """Whether CUDA's driver library can be loaded, which says little of the card but costs nothing."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def run_worker(
    command: Sequence[str], result: Path, log: Path, allocator: str, time_limit: float | None
) -> Measurement:
    """Run a worker process to its end and read ``result``; the process is killed when this is interrupted.

    Raises ``DeviceError`` with the end of ``log`` where the process died or took longer than ``time_limit`` seconds.
    """
    environment = dict(os.environ)
    set_environment(environment, allocator)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            status = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"The worker process did not end within {time_limit:g} s and was stopped. Its last lines:\n"
                f"{last_lines(log)}\nAllow more time, or describe a smaller training."
            ) from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if result.exists():
        return read_result(result)
    raise DeviceError(died(status, last_lines(log)))


def died(status: int, ending: str) -> str:
    """What to say of a worker that ended without a result; ``status`` as in ``subprocess``, negative for a signal."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
    advice = "Signal 9 usually means that the machine ran out of host memory. " if status == -9 else ""
    return (
        f"The worker process that used the GPU {how}. {advice}Its last lines:\n{ending}\n"
        "If the message is not about your own code, check that `nvidia-smi` works and that PyTorch fits the driver."
    )


def last_lines(log: Path) -> str:
    """The end of a log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-LOG_LINES:]) or "    (it wrote nothing)"
