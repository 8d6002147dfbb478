"""Start the process of a script and wait for its outcomes.

The script runs in a process of its own: its output stays apart, ``sys.exit`` and crashes end that process only, and it
can be ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from trainatomy.errors import DeviceError, SimulationError, WorkloadError
from trainatomy.results.measurement import Measurement
from trainatomy.scripts.command import Command
from trainatomy.scripts.job import CRASH, Job, Outcome

_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "BITSANDBYTES_NOWELCOME": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "CUDA_VISIBLE_DEVICES": "0",
}
"""Nothing is compiled, no tracker records."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_GRACE = 60.0
"""Seconds that a process has to end after its time limit, and after Ctrl-C."""
_ANSWER = 0.5
"""Seconds that a process has to write where it is, before it is ended."""
_ACCELERATE_COUNTS = ("--num-processes", "--config-file")
"""Options of ``accelerate launch`` that say how many processes it starts."""
_LAUNCHER_ENDS = 40.0
"""Seconds that a launcher has to end its processes; torchrun gives them 30."""
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
_LIBRARIES = 120.0
"""Seconds for importing the libraries, which the limit of the script does not count."""


def run_script(job: Job, output: Path | None = None) -> tuple[Outcome, ...]:
    """Run a script in a process of its own, once for each GPU, and return what came of it.

    Args:
        job: The script and the GPUs.
        output: File for what the script prints; None for stderr.
    """
    job.command.file()  # a missing file is reported at once
    with tempfile.TemporaryDirectory(prefix="trainatomy-run-") as folder, _target(output) as target:
        file = Path(folder, "job.pickle")
        file.write_bytes(pickle.dumps(job))
        process = subprocess.Popen(
            [sys.executable, "-m", "trainatomy.scripts.child", str(file), folder],
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=target,
            env=environment({**os.environ, **dict(job.command.variables)}, folder, network=job.network),
        )
        code = _wait(process, _LIBRARIES + (job.time_limit + _GRACE) * len(job.gpus))
        return tuple(_outcome(job, folder, gpu, code) for gpu in job.gpus)


def measure_script(job: Job, output: Path | None = None) -> Measurement:
    """Run a script for real until its steps are done: in a process of its own, or in those that its launcher starts.

    Returns:
        The measurement of rank 0, or of a rank that failed before it.

    Raises:
        DeviceError: It did not reach its first step, or its process ended without a word.
    """
    job.command.file()
    with tempfile.TemporaryDirectory(prefix="trainatomy-run-") as folder, _target(output) as target:
        file = Path(folder, "job.pickle")
        file.write_bytes(pickle.dumps(job))
        words = [*started_by(job.command), "-m", "trainatomy.integrations.measured_script", str(file), folder]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=target, stderr=target, env=visible_gpus(job.command, os.environ)
        )
        code = _wait(process, _LIBRARIES + job.time_limit, is_asked=signal.SIGTERM, answers_in=_LAUNCHER_ENDS)
        found = [pickle.loads(file.read_bytes()) for file in sorted(Path(folder).glob("measured-*.pickle"))]
        if not found:
            raise DeviceError(_measured_nothing(job, code))
        first: Measurement | str = found[0]
        if isinstance(first, str):
            raise DeviceError(first)
        return first


def visible_gpus(command: Command, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with as many GPUs as the dry run has: a process without a launcher sees one.

    With more, the Trainer would use all of them by ``DataParallel``.
    """
    count = 1 if command.launch is None else command.launch.gpus
    given = {**given, **dict(command.variables)}
    visible = given.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {**given, "CUDA_VISIBLE_DEVICES": ",".join(visible[:count])}


def started_by(command: Command) -> list[str]:
    """Return the words that start a script's own process, or its launcher, of the installed Python.

    Raises:
        WorkloadError: Its launcher needs several machines.
    """
    launch = command.launch
    if launch is None:
        return [sys.executable]
    if launch.nodes > 1:
        raise WorkloadError(f"--measure: `{command.text}` starts {launch.nodes} machines; this is one")
    words = [word for word in command.launcher if word.replace("_", "-") != "--no-python"]
    if not words:  # --gpus
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.gpus}"]
    if words[0] == "accelerate":
        has_count = any(word.partition("=")[0].replace("_", "-") in _ACCELERATE_COUNTS for word in words)
        # Without a number it would take all GPUs of the machine; the dry run takes what the command says.
        count = [] if has_count else [f"--num_processes={launch.gpus}"]
        return [sys.executable, "-m", "accelerate.commands.launch", *count, *words[2:]]
    return [sys.executable, "-m", "torch.distributed.run", *words[1:]]


def _measured_nothing(job: Job, code: int | None) -> str:
    if code is None:
        return (
            f"{job.command.name} did not reach its {job.steps} steps within {job.time_limit:g} s (--time-limit), and "
            "was ended: nothing was measured"
        )
    return f"the script's process ended with code {code} and measured nothing; its output says more"


def environment(given: Mapping[str, str], folder: str, *, network: bool) -> dict[str, str]:
    """Return the variables of the script's process; caches of data sets go to a folder in ``folder``, which exists."""
    own = {} if network else _OFFLINE
    cache = Path(folder, "datasets")
    cache.mkdir(exist_ok=True)
    return {**given, **_ENVIRONMENT, **own, "HF_DATASETS_CACHE": str(cache)}


@contextlib.contextmanager
def _target(output: Path | None) -> Iterator[IO[Any] | int]:
    """Yield where the script's output goes."""
    if output is not None:
        with output.open("wb") as file:
            yield file
        return
    try:
        yield sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # stderr is no file, as under pytest
        yield subprocess.DEVNULL


def _wait(
    process: subprocess.Popen[bytes],
    seconds: float,
    *,
    is_asked: int | None = getattr(signal, "SIGUSR1", None),
    answers_in: float = _ANSWER,
) -> int | None:
    """Wait for a process; Ctrl-C, which it gets too, lets it report what it has, and a second one ends it.

    Args:
        process: The process.
        seconds: Its time limit.
        is_asked: Signal before it is killed: a dry run writes where it is, a launcher ends its processes.
        answers_in: Seconds after that signal.

    Returns:
        Its exit code; None: it did not end in time and was killed.
    """
    limit, was_interrupted = seconds, False
    while True:
        try:
            return process.wait(limit)
        except KeyboardInterrupt:
            if was_interrupted:
                process.kill()
                raise
            limit, was_interrupted = _GRACE, True
        except subprocess.TimeoutExpired:
            if is_asked is not None:
                process.send_signal(is_asked)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(answers_in)
            process.kill()
            process.wait()
            return None


def _outcome(job: Job, folder: str, gpu: str, code: int | None) -> Outcome:
    file = Path(folder, f"{gpu}.pickle")
    if file.is_file():
        found: Outcome = pickle.loads(file.read_bytes())
        return found
    crash = Path(folder, CRASH)
    place = crashed_at(crash.read_text(errors="replace")) if crash.is_file() else ""
    where = f" at {place}" if place else ""
    if code is None:
        message = (
            f"{job.command.name} did not stop{where} when its time was up ({job.time_limit:g} s, --time-limit), and "
            "was ended: it catches every exception (`except:`), or waits in code that Python cannot interrupt"
        )
    elif code == -signal.SIGKILL:
        message = f"{job.command.name} was killed{where}: probably this machine is out of memory"
    elif code < 0:
        message = (
            f"{job.command.name} crashed{where} ({signal.Signals(-code).name}): compiled code, such as an extension "
            "of its own, read a tensor's memory, which does not exist in a dry run.\nReplace it by PyTorch's operators "
            "for the dry run, or measure the script: trainatomy run --measure"
        )
    else:
        message = f"the script's process ended with code {code}{where} before it reported anything; see its output"
    return Outcome(gpu, None, message, SimulationError.exit_code)


def crashed_at(text: str) -> str:
    """Return ``train.py:31`` for the user's innermost line in what ``faulthandler`` wrote; "" if there is none."""
    from trainatomy.scripts.places import add_libraries, is_users, libraries_in

    add_libraries(libraries_in(os.environ))
    lines = [(one[1], one[2]) for one in _FRAME.finditer(text) if is_users(one[1])]
    return f"{Path(lines[0][0]).name}:{lines[0][1]}" if lines else ""
