"""The worker process that measures: ``python -m trainatomy.measurement.process.worker [--fork]``.

Reads jobs as lines of JSON from standard input and answers each on standard output: lines of progress, then a result,
then the exit code of the process that ran it.  What libraries print goes to standard error, which is the log.  With
``--fork`` each job runs in a child process in which CUDA is not initialised yet; without it, one job runs in this
process.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from trainatomy.errors import TrainatomyError
from trainatomy.libraries import version_of
from trainatomy.measurement.process.job import NVML_CHECK, Job, Reporter, set_environment, to_plain
from trainatomy.processes import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FAILED = 1
_WARM_POOL = "TORCH_WARM_POOL"
"""Older releases of PyTorch start processes that compile when Inductor is imported, unless this variable is 0."""
_IMPORTED_BY = {"bitsandbytes": "torch._inductor.compile_fx"}
"""What the import of a library imports for the most part, where the library itself would initialise CUDA."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve jobs until standard input ends."""
    forking = "--fork" in (sys.argv[1:] if arguments is None else arguments)
    answers = _redirect_stdout()
    if forking:
        ready = preload()
        Reporter(answers).write({"ready": ready})
        if not ready:
            return 0
    for line in sys.stdin:
        job = Job.from_json(line)
        status = _run_in_child(job, answers) if forking else _run(job, answers)
        Reporter(answers).write({"ended": status})
        if not forking:
            return 0
    return 0


def preload(allocator: str = "") -> bool:
    """Import what every training needs; return False if that initialised CUDA, so that no fork can use the GPU.

    Loops of libraries that are not installed are left out.

    ``allocator``: options of PyTorch's allocator, which it reads when it is loaded.
    """
    os.environ[NVML_CHECK] = "1"
    set_environment(os.environ, allocator)
    with _hidden("bitsandbytes"), _without_pool():
        import torch

        from trainatomy.measurement.step import runner  # noqa: F401
        from trainatomy.workload.loops import LOOPS

        installed = (loop for loop in LOOPS.values() if all(map(version_of, loop.libraries)))
        for loop in installed:
            for module in (*loop.imports, loop.module):
                import_module(module)
        for library, module in _IMPORTED_BY.items():
            if version_of(library):
                import_module(module)
    return not torch.cuda.is_initialized()


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make ``module`` look as if it were not installed, then restore it."""
    loaded = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if loaded is None:
            del sys.modules[module]
        else:
            sys.modules[module] = loaded


@contextmanager
def _without_pool() -> Iterator[None]:
    """Keep PyTorch from starting processes that compile: a fork would share them."""
    before = os.environ.get(_WARM_POOL)
    os.environ[_WARM_POOL] = "0"
    try:
        yield
    finally:
        del os.environ[_WARM_POOL]
        if before is not None:
            os.environ[_WARM_POOL] = before


def _redirect_stdout() -> int:
    """Send standard output to standard error and return a descriptor for answers."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def _run_in_child(job: Job, answers: int) -> int:
    """Run ``job`` in a child; return its exit code, negative for a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    worker = os.getpid()
    pid = os.fork()
    if not pid:
        end_with_parent(worker)
        _run_and_exit(job, answers)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_and_exit(job: Job, answers: int) -> NoReturn:
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
    """Run ``job`` in this process; an unexpected error leaves its traceback in the log."""
    reporter = Reporter(answers, "recorded" if job.recorded else "control")
    set_environment(os.environ, job.workload.get("allocator", ""))
    try:
        reporter.stage("loading libraries")
        # imports torch, whose allocator reads the environment that was just set
        from trainatomy.measurement.step import runner

        reporter.result(to_plain(runner.run(job, reporter)))
    except TrainatomyError as error:
        reporter.result(to_plain(error))
    except Exception:
        traceback.print_exc()
        return FAILED
    return 0


if __name__ == "__main__":
    end_with_parent()
    raise SystemExit(main())
