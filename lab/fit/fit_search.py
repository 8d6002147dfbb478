"""The search for several sizes of a GPU at once: what one of them executes is not executed again for the others.

The outcome is that of ``trainatomy.api.fit`` for each size: the same search, whose executions are remembered, because
a simulation does not depend on how much memory the GPU has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import fit_cases
from fit_cases import Case

from trainatomy import api
from trainatomy.catalog.calibrations import Calibration, resolve_calibration
from trainatomy.errors import TrainatomyError
from trainatomy.requests.fitting import FitRequest
from trainatomy.results.fit import Fit
from trainatomy.results.prediction import Prediction
from trainatomy.runs.predicting import PredictionPool, predict_rows, prediction_pool
from trainatomy.search.explore import Observer
from trainatomy.search.fitting import search
from trainatomy.workload.schema import Workload

Result = Prediction | TrainatomyError


def choices(
    case: Case,
    limits_gib: Sequence[int],
    options: FitRequest,
    torch: str,
    jobs: int,
    calibration: Path | None = None,
) -> dict[int, Fit]:
    """Search for a case on each size of the GPU, without the price lists."""
    given = {gib: _workload(case.mapping, gib, torch) for gib in limits_gib}
    predict = partial(under_limits, tuple(limits_gib), resolve_calibration(calibration))
    with prediction_pool(predict, jobs) as pool:
        executor = Remembering(pool, tuple(limits_gib))
        return {gib: search(workload, options, executor, Observer())[0] for gib, workload in given.items()}


def under_limits(limits_gib: tuple[int, ...], calibration: Calibration | None, workload: Workload) -> Any:
    """Predict a workload on each size of the GPU, from one simulation."""
    predict = partial(api.predict, calibration=calibration, timeline=True, layouts=False)  # as candidates of a search
    return predict_rows(predict, [_workload(workload.to_mapping(), gib) for gib in limits_gib])


def _workload(mapping: dict[str, Any], gib: int, torch: str | None = None) -> Workload:
    software = {"software": {"torch": torch}} if torch else {}
    return Workload.from_mapping(mapping | {"gpu": fit_cases.limited(gib)} | software)


class Remembering:
    """An executor of the search that predicts for every size at once and remembers the predictions."""

    def __init__(self, pool: PredictionPool, limits_gib: tuple[int, ...]) -> None:
        self.pool = pool
        self.jobs = pool.jobs
        self.limits_gib = limits_gib
        self.known: dict[str, Future[Any]] = {}

    def kinship(self, workload: Workload) -> str | None:
        """Return what is equal for trainings of which one is predicted faster after another."""
        return self.pool.kinship(workload)

    def pick(self, kinships: Sequence[str | None]) -> int:
        """Return the place of the training to begin next."""
        return self.pool.pick(kinships)

    def submit(self, workload: Workload) -> Future[Result]:
        """Begin to predict a training on its GPU, or return what is known."""
        mapping = workload.to_mapping()
        place = self.limits_gib.index(int(mapping.pop("gpu")["memory_bytes"]) // fit_cases.GIB)
        key = json.dumps(mapping, sort_keys=True)
        if key not in self.known:
            self.known[key] = self.pool.submit(workload)
        answer: Future[Result] = Future()

        def take(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                found = done.result()
                answer.set_result(found if isinstance(found, TrainatomyError) else found[place])

        self.known[key].add_done_callback(take)
        return answer
