"""The process of a script: ``python -m trainatomy.scripts.child JOB FOLDER PARENT``, with an outcome for each GPU."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from trainatomy.errors import TrainatomyError
from trainatomy.processes import end_with_parent
from trainatomy.scripts import guard
from trainatomy.scripts import job as places
from trainatomy.scripts.command import variables
from trainatomy.scripts.job import CRASH, INTERRUPTED, Job, Outcome
from trainatomy.scripts.launch import listen
from trainatomy.scripts.programs import programs

BUG = 70
HANDED_OVER = 71
"""Exit code of a GPU's process whose script leaves the training to another command, on all GPUs."""


def main(job_file: str, folder: str, parent: str) -> None:
    """Run the job in a file, write its outcomes into a folder, and end with the parent.

    The wall is there before any library starts a thread, which it would not surround.
    """
    end_with_parent(int(parent))
    job: Job = pickle.loads(Path(job_file).read_bytes())
    _let_interrupts_end(job, folder)
    listen()
    _note_crashes(folder)
    guard.put_up([folder], programs(), network=job.network)
    from trainatomy.scripts.imports import compiling, preload
    from trainatomy.scripts.run import run_job

    places.add_libraries(places.libraries_in(os.environ))
    try:
        file = job.command.file()
        places.add_run(job.command.package())
        os.environ.update(variables(job.command))
        preload()
        job, eager = compiling(job, file)
    except TrainatomyError as error:
        for gpu in job.gpus:
            _write(folder, Outcome(gpu, None, str(error), error.exit_code))
        return
    if len(job.gpus) == 1:
        _end(folder, partial(_outcome, job, job.gpus[0], run_job, eager, folder))
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))  # it is for the processes of the GPUs
    own = os.getpid()
    for gpu in job.gpus:
        if interrupts:
            _write(folder, Outcome(gpu, None, f"{job.command.name} was interrupted on a GPU before", INTERRUPTED))
        elif os.fork() == 0:
            end_with_parent(own)
            _let_interrupts_end(job, folder)
            _end(folder, partial(_outcome, job, gpu, run_job, eager, folder))
        elif os.WEXITSTATUS(os.wait()[1]) == HANDED_OVER:
            return


def _end(folder: str, run: Callable[[], Outcome]) -> NoReturn:
    """Write the outcome of a GPU, and end the process: what the script has registered for its end is not called."""
    try:
        guard.end_forks()
        outcome = run()
        _write(folder, outcome)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if outcome.handover is None else HANDED_OVER)
    finally:
        os._exit(1)


def _let_interrupts_end(job: Job, folder: str) -> None:
    """Let Ctrl-C end the process until the script runs: libraries that are being imported may catch it."""

    def end(number: int, frame: FrameType | None) -> None:
        message = f"{job.command.name} was interrupted before it began: its libraries were being imported"
        for gpu in job.gpus:
            if not Path(folder, f"{gpu}.pickle").is_file():
                _write(folder, Outcome(gpu, None, message, INTERRUPTED))
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)


def _note_crashes(folder: str) -> None:
    """Write where Python is to a file when the process crashes, and when its parent asks before it kills it."""
    file = Path(folder, CRASH).open("w")  # noqa: SIM115 - it stays open as long as the process
    faulthandler.enable(file, all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)


def _outcome(job: Job, gpu: str, run_job: object, eager: str, folder: str) -> Outcome:
    """Run the job on one GPU; an error of ours is an outcome, too."""
    try:
        return run_job(job, gpu, is_last=True, eager=eager, folder=folder)  # type: ignore[operator]
    except TrainatomyError as error:
        return Outcome(gpu, None, str(error), error.exit_code)
    except Exception as error:
        traceback.print_exc()
        message = f"this is a bug in trainatomy ({type(error).__name__}: {error})"
        return Outcome(gpu, None, message, BUG)


def _write(folder: str, outcome: Outcome) -> None:
    Path(folder, f"{outcome.gpu}.pickle").write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
