"""Remedies: those that the peak calls for, without changes that are not needed, and without executing the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pretender import GIB, TINY, Phased, Pretender

from trainatomy.errors import WorkloadError
from trainatomy.requests.fitting import FitRequest, refusal
from trainatomy.results.fit import Remedy, Shortage
from trainatomy.results.prediction import Prediction
from trainatomy.search.axes import axes_of
from trainatomy.search.remedies import shortage_of
from trainatomy.workload.schema import Workload

EVALUATING = {"data.compute_metrics": True, "data.eval_samples": 64, "train.eval_strategy": "steps"}
_CONFIG = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}


@dataclass
class Gathering(Phased):
    """A training whose evaluations gather outputs, and run with batches of their own."""

    evaluated: float = 0.5

    def held(self, workload: Workload) -> tuple[list[tuple[str, dict[str, float]]], float, float]:
        phases, cache, seconds = super().held(workload)
        train = workload.train
        gathers = workload.gathers_outputs and workload.data.preprocess_logits_for_metrics is None
        gathered = self.gathered if gathers else 0.1 * (train.eval_accumulation_steps or 0)
        parts = {**phases[-1][1], "gathered_outputs": gathered, "temporary": self.evaluated * workload.eval_batch_size}
        return [*phases[:-1], ("evaluation", parts)], cache, seconds


def shortage(
    pretender: Pretender, memory: float, settings: dict[str, Any] | None = None, **options: Any
) -> tuple[Workload, Shortage]:
    gpu = {"base": "rtx-3090", "memory_bytes": round(memory * GIB)}
    workload = Workload.from_mapping(TINY).replace({**(settings or {}), "gpu": gpu})
    return workload, shortage_of(workload, FitRequest(headroom=0.0), pretender, **options)


def names(remedies: tuple[Remedy, ...], kind: str) -> list[set[str]]:
    return [
        {change.option for change in each.changes} for each in remedies if each.kind == kind and each.candidate.fits
    ]


@pytest.mark.parametrize(
    ("gathered", "evaluated", "expected"),
    [
        (30.0, 0.1, {"accumulate_8", "accumulate_1", "predicted_ids", "loss_only"}),
        (0.0, 4.0, {"4", "1"}),
    ],
)
def test_an_evaluation_that_does_not_fit_is_changed_itself(
    some_prediction: Prediction, gathered: float, evaluated: float, expected: set[str]
) -> None:
    model = Gathering(weights=1.0, sample=0.1, gathered=gathered, evaluated=evaluated)
    executor = Pretender(some_prediction, model)
    _, found = shortage(executor, 22, EVALUATING)
    kept = names(found.remedies, "same training")
    assert {option for changes in kept for option in changes} == expected and all(len(each) == 1 for each in kept)
    asked = [one for one in executor.asked if one.gpu == executor.asked[0].gpu and one.parallel.gpus == 1]
    assert not any(one.train.gradient_checkpointing or one.train.optim == "sgd" for one in asked), "they do not help"
    assert {change.permission for each in found.remedies for change in each.changes if not change.changes_training} <= {
        "evaluation", "",
    }  # fmt: skip


@pytest.mark.parametrize("memory", [4, 6, 9, 12, 16, 20, 25])
@pytest.mark.parametrize("sample", [0.5, 4.0])
def test_a_set_has_no_change_that_is_not_needed(some_prediction: Prediction, memory: float, sample: float) -> None:
    model = Phased(weights=14.0, sample=sample, logits=0.1)
    workload, found = shortage(Pretender(some_prediction, model), memory)
    sets = [
        each for each in found.remedies if each.candidate.fits and each.kind in ("same training", "changes training")
    ]
    for remedy in sets:
        for change in remedy.changes if len(remedy.changes) > 1 else ():
            rest = {
                key: value for other in remedy.changes if other is not change for key, value in other.settings.items()
            }
            try:
                without = workload.replace(rest)
            except WorkloadError:
                continue  # quantised weights without the adapters
            assert model.needed(without)[0] > memory, change.option
    assert sets or memory < 5


def test_quantised_weights_come_with_adapters_where_these_alone_do_not_suffice(some_prediction: Prediction) -> None:
    _, found = shortage(Pretender(some_prediction, Phased(weights=14.0, sample=0.05, logits=0.01)), 10)
    assert {"r16", "nf4"} in names(found.remedies, "changes training")


def test_a_training_that_was_predicted_is_not_predicted_again(some_prediction: Prediction) -> None:
    executor = Pretender(some_prediction, Phased(weights=4.0))
    workload, found = shortage(executor, 10)
    again = Pretender(some_prediction, Phased(weights=4.0))
    _, known = shortage(again, 10, prediction=executor.prediction(workload))
    assert len(again.asked) == len(executor.asked) - 1
    options = [sorted([change.option for change in each.changes] for each in one.remedies) for one in (found, known)]
    assert options[0] == options[1]


def test_a_larger_gpu_suffices_where_the_allocator_frees_its_cache(some_prediction: Prediction) -> None:
    class Filling(Phased):
        """Its cache fills the GPU, whatever it has."""

        def held(self, workload: Workload) -> tuple[list[tuple[str, dict[str, float]]], float, float]:
            phases, cache, seconds = super().held(workload)
            total = workload.resolve_gpu().memory_bytes / GIB - 0.01
            return phases, max(total - 50.0, cache), seconds

    _, found = shortage(Pretender(some_prediction, Filling(weights=0.5, sample=0.01, gathered=48.0)), 22)
    larger = [each.candidate for each in found.remedies if each.kind == "larger GPU"]
    assert len(larger) == 2 and larger[0].prediction.gpu.memory_bytes < 85 * GIB
    assert larger[1].prediction.gpu.memory_bytes > 1.1 * larger[0].prediction.gpu.memory_bytes


def test_more_gpus_than_samples_get_one_each(some_prediction: Prediction) -> None:
    train = {"train.per_device_train_batch_size": 1}
    _, found = shortage(Pretender(some_prediction, Phased(weights=4.0, sample=30.0)), 22, train)
    more = [[change.option for change in each.changes] for each in found.remedies if each.kind == "more GPUs"]
    assert ["2", "fsdp2", "1", "2", "on"] in more


def test_what_deepspeed_decides_is_not_varied() -> None:
    workload = Workload.from_mapping({
        **TINY, "train": {"deepspeed": _CONFIG}, "parallel": {"gpus": 2},
    })  # fmt: skip
    assert refusal(workload) is None
    assert {axis.name for axis in axes_of(workload, 8)} == {
        "batch", "gradient_checkpointing", "attention", "allocator", "lora", "sequence_length",
    }  # fmt: skip
    fixed = workload.replace("train.deepspeed", {**_CONFIG, "train_micro_batch_size_per_gpu": 8})
    assert [option.name for option in axes_of(fixed, 8)[0].options] == ["8"]
