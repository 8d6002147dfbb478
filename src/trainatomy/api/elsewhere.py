"""Predictions that are made elsewhere: functions for other processes, and workloads as keywords change them.

Nothing here imports PyTorch, which takes a process seconds: one that only sends trainings to others needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError
from trainatomy.requests.predicting import PredictRequest, Training
from trainatomy.results.prediction import Prediction
from trainatomy.workload.arguments import check_keywords, path_of
from trainatomy.workload.measurable import fewer_lengths
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch

_SECTIONS = frozenset(Workload.model_fields) - {"train"}


def changed(
    workload: Workload,
    optimizer: str | type[torch.optim.Optimizer] | Callable[[Any], Any] | None,
    gpu: str | None,
    settings: Mapping[str, Any],
) -> Workload:
    """Return the workload with keywords applied: settings of ``train``, and sections by their name."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in _SECTIONS:
            changes[f"train.{name}"] = value
        elif isinstance(value, Mapping):
            changes |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            changes[name] = value
    if gpu is not None:
        changes["gpu"] = gpu
    if optimizer is not None:
        changes["train.optim"] = optimizer if isinstance(optimizer, str) else path_of(optimizer)
    return workload.replace(changes) if changes else workload


def with_settings(workload: Workload, settings: Mapping[str, Any], gpu: str | None = None) -> Workload:
    """Return the workload with keywords applied, ``optimizer`` among them; a batch is refused."""
    check_keywords(None, settings.get("optimizer"))
    if "batch" in settings:
        raise WorkloadError("batch: only predict takes one; name data.factory in the workload", key="data")
    rest = {name: value for name, value in settings.items() if name != "optimizer"}
    return changed(workload, settings.get("optimizer"), gpu, rest)


def predict_row(request: PredictRequest, workload: Workload) -> Prediction:
    """Predict one of several training runs, in the process that this is called in."""
    from trainatomy.api.predicting import predict_training  # imports PyTorch

    return predict_training(Training(workload), request.of_era(workload))


def predict_candidate(predict: Callable[[Workload], Prediction], workload: Workload) -> Prediction:
    """Return the prediction of one of many candidates, of fewer orders and lengths where samples differ in length."""
    found = predict(fewer_lengths(workload))
    return found if found.lengths is None else replace(found, workload=workload.to_mapping())
