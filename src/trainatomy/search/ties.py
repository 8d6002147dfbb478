"""Ties: candidates that may be faster than the best one, by the error of a ratio of two predicted step times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.results.fit import Candidate, Fit
from trainatomy.results.prediction import Prediction

HOST_BOUND_SHARE = 0.85
"""A step counts as bound by the host if the CPU is busy for this share of the GPU's time: then either may bound it."""


def with_ties(fit: Fit) -> Fit:
    """Return the outcome with the runner-ups that may be faster than the best candidate."""
    best = fit.best
    if best is None:
        return fit
    ties = tuple(each for each in fit.runner_ups if _may_be_faster(each, best))
    return replace(fit, ties=ties)


def _may_be_faster(candidate: Candidate, best: Candidate) -> bool:
    """Return whether a slower candidate is within the error, unless all it does is to recompute more activations."""
    own, others = (_without_checkpointing(each.workload) for each in (candidate, best))
    if own == others and _checkpointed_layers(candidate.workload) > _checkpointed_layers(best.workload):
        return False
    return candidate.step_seconds / best.step_seconds <= tie_factor(candidate.prediction, best.prediction)


def _without_checkpointing(workload: Mapping[str, Any]) -> dict[str, Any]:
    train = dict(workload.get("train", {}))
    for name in ("gradient_checkpointing", "gradient_checkpointing_every"):
        train.pop(name, None)
    return {**workload, "train": train}


def _checkpointed_layers(workload: Mapping[str, Any]) -> float:
    """Return the share of layers that recompute their activations."""
    train = workload.get("train", {})
    return 1 / int(train.get("gradient_checkpointing_every", 1)) if train.get("gradient_checkpointing") else 0.0


def tie_factor(first: Prediction, second: Prediction) -> float:
    """Return the factor by which two predicted times differ at most while either may be the shorter one.

    The intervals are of ratios of measured to predicted step times on one machine (``catalog/ratio_intervals.yaml``).
    """
    calibrated = "calibrated" if all(_is_calibrated(each) for each in (first, second)) else "uncalibrated"
    hosts = [_is_host_bound(first), _is_host_bound(second)]
    kind = "host" if all(hosts) else "mixed" if any(hosts) else "gpu"
    low, high = read_yaml("ratio_intervals.yaml")[calibrated][kind]
    return math.sqrt(high / low)


def _is_host_bound(prediction: Prediction) -> bool:
    time = prediction.time
    assert time is not None
    return time.host_seconds > HOST_BOUND_SHARE * time.gpu_seconds


def _is_calibrated(prediction: Prediction) -> bool:
    time = prediction.time
    assert time is not None
    return time.calibrated
