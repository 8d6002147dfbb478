"""Start the process of a script and wait for its outcomes.

The script runs in a process of its own: its output stays apart, ``sys.exit`` and crashes end that process only, and it
can be ended.

The temporary folder of a run: removed when it ends, or by a later run if its process was killed.

Start the process of a script and wait for it: its time limit, Ctrl-C and SIGTERM end it, and it reports first.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from trainatomy.errors import DeviceError, SimulationError, TrainatomyError, WorkloadError
from trainatomy.results.measurement import Measurement
from trainatomy.scripts.command import Command
from trainatomy.scripts.job import (
    CRASH,
    INTERRUPTED,
    Job,
    Outcome,
    add_libraries,
    is_users,
    libraries_in,
    line_of_library,
)

_PREFIX = "trainatomy-run-"
_HELD = "held"
"""File that the process of a run keeps locked as long as it lives."""


@contextlib.contextmanager
def run_folder() -> Iterator[str]:
    """Yield a new temporary folder; those that killed runs have left are removed before."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / "new").open("w") as file:
            with contextlib.suppress(OSError):
                _lock(file)
                (folder / "new").rename(folder / _HELD)  # no other run finds it before it is locked
            yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the user's folders whose file nobody has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                with (folder / _HELD).open("r+") as file:
                    _lock(file)
                    shutil.rmtree(folder, ignore_errors=True)


def _lock(file: IO[str]) -> None:
    """Lock an open file, as long as the process keeps it open.

    Raises:
        OSError: Another process has locked it, or files cannot be locked there.
    """
    if sys.platform == "win32":
        raise OSError("files are not locked on Windows")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_GRACE = {signal.SIGINT: 60.0, signal.SIGTERM: 8.0}
"""Seconds that a process has to report after a signal; ``docker stop`` waits 10 s before it kills everything."""


class Interrupted(KeyboardInterrupt):
    """This process was asked to end; ``signal`` is how."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


def start(words: Sequence[str], output: IO[Any] | int, environment: Mapping[str, str], **options: Any) -> Any:
    """Start a process in a group of its own, so that a signal reaches it once: from ``wait``.

    SIGINT is blocked in it until it calls ``listen``, if it does.
    """
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        process_group=0,
        **options,
    )


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Let SIGINT wait until the block ends, also in processes that it starts, until they ``listen``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def listen() -> None:
    """Receive SIGINT from now on, also one that waits already."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def wait(
    process: subprocess.Popen[bytes], seconds: float, *, ask: Callable[[], object], answers_in: float
) -> int | None:
    """Wait for a process; Ctrl-C or SIGTERM lets it report what it has, and a second one ends it.

    Args:
        process: A process that was started by ``start``.
        seconds: Its time limit.
        ask: Called before it is killed: a dry run writes where it is, a launcher ends its processes.
        answers_in: Seconds after that.

    Returns:
        Its exit code; None: it did not end in time and was killed.
    """
    limit, was_interrupted = seconds, False
    with _terms_interrupt():
        while True:
            try:
                return process.wait(limit)
            except KeyboardInterrupt as error:
                if was_interrupted:
                    send(process, signal.SIGKILL)
                    raise
                send(process, signal.SIGINT)
                limit = _GRACE[error.signal if isinstance(error, Interrupted) else signal.SIGINT]
                was_interrupted = True
            except subprocess.TimeoutExpired:
                ask()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(answers_in)
                send(process, signal.SIGKILL)
                process.wait()
                return -signal.SIGINT if was_interrupted else None


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process that has not ended, and to what it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


@contextlib.contextmanager
def _terms_interrupt() -> Iterator[None]:
    """Let SIGTERM interrupt the block, where nothing else handles it and this is the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",
    "BITSANDBYTES_NOWELCOME": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "POSTHOG_DISABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "SCARF_NO_ANALYTICS": "true",
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "YOLO_OFFLINE": "true",
    "WANDB_MODE": "disabled",
    "WANDB_DISABLED": "true",
    "COMET_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "JOBLIB_MULTIPROCESSING": "0",
    "OMPI_MCA_ess_singleton_isolated": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "CUDA_VISIBLE_DEVICES": "0",
}
"""Nothing is compiled, no tracker records, downloads go through Python, and neither joblib nor Open MPI
(which Lightning asks for its rank) starts a process."""
_CACHES = {
    "HF_DATASETS_CACHE": "datasets",
    "HF_MODULES_CACHE": "modules",
    "NUMBA_CACHE_DIR": "numba",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "TMPDIR": "tmp",
}
"""Folders in that of the run, for what libraries keep by code that is not Python's, or import again."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_GRACE_AFTER_LIMIT = 60.0
"""Seconds that a process has to end after its time limit."""
_ANSWER = 0.5
"""Seconds that a process has to write where it is, before it is ended."""
_ACCELERATE_COUNTS = ("--num-processes", "--config-file")
"""Options of ``accelerate launch`` that say how many processes it starts."""
_LAUNCHER_ENDS = 40.0
"""Seconds that a launcher has to end its processes; torchrun gives them 30."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)', re.MULTILINE)
_MOST_HANDOVERS = 4
_LIBRARIES = 120.0
"""Seconds for importing the libraries, which the limit of the script does not count."""


def run_script(job: Job, output: Path | None = None) -> tuple[Outcome, ...]:
    """Run a script in a process of its own, once for each GPU, and return what came of it.

    Args:
        job: The script and the GPUs.
        output: File for what the script prints; None for stderr.
    """
    job.command.file()  # a missing file is reported at once
    with run_folder() as folder, _target(output) as target:
        outcomes = _outcomes(job, folder, target)
        while (handover := outcomes[0].handover) is not None:
            try:
                if len(job.handovers) == _MOST_HANDOVERS:
                    raise SimulationError(f"that is the {_MOST_HANDOVERS + 1}th command in a row that starts another")
                job = job.handed_over(handover)
            except TrainatomyError as error:
                message = f"{job.command.name} starts `{handover.text}`: {error}"
                return tuple(Outcome(gpu, None, message, error.exit_code) for gpu in job.gpus)
            outcomes = _outcomes(job, folder, target)
        return outcomes


def _outcomes(job: Job, folder: str, output: IO[Any] | int) -> tuple[Outcome, ...]:
    """Run a job's command in a process of its own, which finds what the commands before it have written."""
    for former in Path(folder).glob("*.pickle"):
        former.unlink()
    file = Path(folder, "job.pickle")
    file.write_bytes(pickle.dumps(job))
    words = [sys.executable, "-m", "trainatomy.scripts.child", str(file), folder, str(os.getpid())]
    variables = environment({**os.environ, **dict(job.command.variables)}, folder, network=job.network)
    for handover in job.handovers:
        variables.update(handover.variables)
    where = job.handovers[-1].folder if job.handovers else None
    with held_interrupts():
        process = start(words, output, variables, cwd=where)
    try:
        limit = _LIBRARIES + (job.time_limit + _GRACE_AFTER_LIMIT) * len(job.gpus)
        code = wait(process, limit, ask=lambda: send(process, signal.SIGUSR1), answers_in=_ANSWER)
    finally:
        send(process, signal.SIGKILL)
    return tuple(_outcome(job, folder, gpu, code) for gpu in job.gpus)


def measure_script(job: Job, output: Path | None = None) -> Measurement:
    """Run a script for real until its steps are done: in a process of its own, or in those that its launcher starts.

    Returns:
        The measurement of rank 0, or of a rank that failed before it.

    Raises:
        DeviceError: It did not reach its first step, or its process ended without a word.
    """
    job.command.file()
    with run_folder() as folder, _target(output) as target:
        file = Path(folder, "job.pickle")
        file.write_bytes(pickle.dumps(job))
        words = [*started_by(job.command), "-m", "trainatomy.integrations.measured_script", str(file), folder]
        process = start(words, target, visible_gpus(job.command, os.environ))
        code = wait(process, _LIBRARIES + job.time_limit, ask=process.terminate, answers_in=_LAUNCHER_ENDS)
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
    """Return the variables of the script's process; its caches are folders in ``folder``, which exists."""
    own = {} if network else _OFFLINE
    caches = {name: Path(folder, part) for name, part in _CACHES.items()}
    for cache in caches.values():
        cache.mkdir(exist_ok=True)
    return {**given, **_ENVIRONMENT, **own, **{name: str(cache) for name, cache in caches.items()}}


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
    elif code in (-signal.SIGINT, INTERRUPTED):
        return Outcome(gpu, None, f"{job.command.name} was interrupted{where} before it reported", INTERRUPTED)
    elif code == -signal.SIGKILL:
        message = f"{job.command.name} was killed{where}: probably this machine is out of memory"
    elif code < 0 and -code not in _CRASHES:
        message = f"{job.command.name} was ended{where} by a signal ({signal.Signals(-code).name})"
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
    """Return ``train.py:31`` for the user's innermost line in what ``faulthandler`` wrote, or else a library's."""
    add_libraries(libraries_in(os.environ))
    frames = [(frame[1], int(frame[2])) for frame in _FRAME.finditer(text)]
    lines = [(name, line) for name, line in frames if is_users(name)]
    return f"{Path(lines[0][0]).name}:{lines[0][1]}" if lines else line_of_library(frames)
