"""The process that measures for ``gpu.measure``: ``python -m trainatomy.measurement.process.session [--fork]``.

Jobs come in as lines of JSON on standard input, an answer goes out for each on standard output: lines of progress, then
a result or how the process that should have made it ended.  What libraries print goes to standard error, which is the
log.  With ``--fork`` each job runs in a child that CUDA is new to; without, there is one job, and it runs here.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.process.forks import NVML_CHECK, preload
from trainatomy.measurement.process.job import Job, set_environment, to_plain
from trainatomy.measurement.process.reporting import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve jobs until standard input ends."""
    forking = "--fork" in (sys.argv[1:] if arguments is None else arguments)
    answers = _take_stdout()
    if forking:
        ready = preload()
        Reporter(answers).write({"ready": ready})
        if not ready:
            return 0
    for line in sys.stdin:
        job = Job.from_json(line)
        status = _in_child(job, answers) if forking else _run(job, answers)
        Reporter(answers).write({"ended": status})
        if not forking:
            return 0
    return 0


def _take_stdout() -> int:
    """The descriptor for answers; whatever is printed from now on goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def _in_child(job: Job, answers: int) -> int:
    """Run ``job`` in a child; returns its exit code, negative for a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _child(job, answers)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _child(job: Job, answers: int) -> NoReturn:
    code = FAILED
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.pop(NVML_CHECK, None)
        code = _run(job, answers)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(job: Job, answers: int) -> int:
    """Run ``job`` in this process; a failure that is not ours to explain leaves a traceback in the log."""
    reporter = Reporter(answers, "recorded" if job.recorded else "control")
    set_environment(os.environ, job.workload.get("allocator", ""))
    try:
        reporter.stage("loading libraries")
        from trainatomy.measurement.step import (
            on_card,  # imports torch, whose allocator reads the environment that was just set
        )

        reporter.result(to_plain(on_card.run(job, reporter)))
    except TrainatomyError as error:
        reporter.result(to_plain(error))
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
