"""Candidates of a search for a live module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from trainatomy.api.elsewhere import predict_candidate
from trainatomy.api.predicting import predict_module
from trainatomy.errors import WorkloadError
from trainatomy.requests.fitting import FitRequest
from trainatomy.requests.predicting import Training
from trainatomy.runs.predicting import PredictionPool
from trainatomy.simulator import live
from trainatomy.workload.schema import Workload


def module_candidates(
    module: nn.Module, training: Training, request: FitRequest
) -> tuple[Workload, FitRequest, PredictionPool]:
    """Return the workload of a live module, the request restricted to what applies to it, and what predicts it here."""
    if request.executor is not None:
        raise WorkloadError(
            "executor: a live module is predicted in this process; give a workload, which workers can build"
        )
    batch, settings = training.batch, training.settings
    make = live.resized(batch) if isinstance(batch, Mapping) else batch
    workload, make_batch = live.described(module, make, training.optimizer, training.gpu, settings)
    if isinstance(batch, Mapping) and "per_device_train_batch_size" not in settings:
        rows = next(len(value) for value in batch.values() if getattr(value, "ndim", 0))
        workload = workload.replace("train.per_device_train_batch_size", rows)
    request.predicting.check_calibration([workload])
    predict = partial(predict_candidate, partial(predict_module, module, make_batch, request.predicting_candidates))
    return workload, _restricted(module, training, request), PredictionPool(predict, None, 1)


def _restricted(module: nn.Module, training: Training, request: FitRequest) -> FitRequest:
    """Return a search restricted to the settings that apply to a live module."""
    live.check_permissions(request.allow, training.batch)
    to_module, can_apply = live.applies_to(module, training.batch), request.can_apply
    if can_apply is None:
        return replace(request, can_apply=to_module)
    return replace(request, can_apply=lambda settings: to_module(settings) and can_apply(settings))
