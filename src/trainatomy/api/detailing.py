"""Predict a training together with every allocation and operation, for reports, snapshots and traces."""

from __future__ import annotations

from typing import Any

from trainatomy.api.predicting import predict
from trainatomy.results.detail import Detail
from trainatomy.results.prediction import Prediction
from trainatomy.runs.options import load_calibration
from trainatomy.workload.schema import Workload


def predict_in_detail(workload: Workload, **keywords: Any) -> tuple[Prediction, Detail]:
    """Return the prediction of a training, and every allocation and operation of the rank that it bills.

    Args:
        workload: The training.
        **keywords: Those of ``predict``.
    """
    from trainatomy.prediction import keep_executed
    from trainatomy.step_detail import detail_of_executed

    calibration = load_calibration(keywords.pop("calibration", None), [workload])
    with keep_executed() as executed:
        prediction = predict(workload, calibration=calibration, **keywords)
    return prediction, detail_of_executed(executed[-1], calibration, timed=keywords.get("timed", True))
