"""Predictions of many trainings, side by side in processes: each executes its steps in a world of its own."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from trainatomy.errors import TrainatomyError, WorkloadError

if TYPE_CHECKING:
    from trainatomy.results.prediction import Prediction
    from trainatomy.workload.schema import Workload

    Predict = Callable[[Workload], Prediction]

MOST = 8
"""Processes: each holds the libraries' own data, some hundred MB."""
INTERRUPTED = 130
FEW = 3
"""Trainings that one process predicts sooner than others have loaded the libraries."""
_LOADED = ("trainatomy.simulator.simulate", "trainatomy.training.loops.trainer", "trainatomy.api")


def jobs_for(count: int, asked: int | None = None) -> int:
    """How many processes predict ``count`` trainings: as many as ``asked``, else one a core, up to ``MOST``.

    Raises ``WorkloadError`` for less than one.
    """
    if asked is None:
        return 1 if count <= FEW else min(count, os.cpu_count() or 1, MOST)
    if asked < 1:
        raise WorkloadError(f"jobs: {asked} processes predict nothing; give 1 or more")
    return min(asked, count)


def predict_all(predict: Predict, workloads: Sequence[Workload], jobs: int = 1) -> list[Prediction | TrainatomyError]:
    """For each workload its prediction, or why there is none, in order.

    ``jobs``: processes, for which ``predict`` must be a function that can be pickled; 1 is this process.  They are
    forked from a fresh one, so nothing that was done here before, CUDA among it, is theirs.
    """
    if jobs <= 1 or len(workloads) <= 1:
        return [_attempt(predict, workload) for workload in workloads]
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_LOADED))
    is_quiet = logging.root.manager.disable >= logging.ERROR
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(is_quiet,))
    try:
        return list(pool.map(partial(_attempt, predict), workloads))
    except BrokenProcessPool as error:
        raise TrainatomyError(
            f"A process that predicted was killed, perhaps for lack of host memory; {jobs} ran side by side. "
            "Try with fewer: jobs=1."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _attempt(predict: Predict, workload: Workload) -> Prediction | TrainatomyError:
    try:
        return predict(workload)
    except TrainatomyError as error:
        return error


def _begin(is_quiet: bool) -> None:
    """What a process does first: what libraries print is no output, and Ctrl-C ends it without a word."""
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    if is_quiet:
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
