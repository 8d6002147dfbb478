"""The process of a script: ``python -m trainatomy.scripts.child JOB FOLDER``, with one outcome for each GPU."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

from trainatomy.errors import TrainatomyError
from trainatomy.scripts.job import Job, Outcome

BUG = 70


def main(job_file: str, folder: str) -> None:
    """Run the job in a file, and write its outcomes into a folder."""
    job: Job = pickle.loads(Path(job_file).read_bytes())
    from trainatomy.scripts import places
    from trainatomy.scripts.preload import libraries_of, preload
    from trainatomy.scripts.run import run_job

    places.add_libraries([one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one])
    try:
        file = job.command.file()
        preload(libraries_of(file))
    except TrainatomyError as error:
        for gpu in job.gpus:
            _write(folder, Outcome(gpu, None, str(error), error.exit_code))
        return
    for gpu in job.gpus:
        if len(job.gpus) == 1:
            _write(folder, _outcome(job, gpu, run_job))
        elif os.fork() == 0:
            try:
                _write(folder, _outcome(job, gpu, run_job))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(0)
        else:
            os.wait()


def _outcome(job: Job, gpu: str, run_job: object) -> Outcome:
    """Run the job on one GPU; an error of ours is an outcome, too."""
    try:
        return run_job(job, gpu)  # type: ignore[operator]
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
