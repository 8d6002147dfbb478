"""The section ``sentence_transformers``: the table of losses, what a loss lacks, and what the loop refuses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload
from trainatomy.workload.sentence_transformers import compares_in_batch, losses, refused_losses, sequences_of
from trainatomy.workload.sweep import with_effective_batch_size


def describe(train: dict[str, Any] | None = None, **spec: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"id": "bert-base-uncased"},
            "loop": "sentence_transformers",
            "sentence_transformers": spec,
            "train": train or {},
        }
    )


def test_every_loss_of_the_library_is_known_and_has_what_the_table_says() -> None:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    classes = {name for name in library.__all__ if hasattr(getattr(library, name), "forward")}
    assert classes == losses().keys() | refused_losses().keys()
    for name, row in losses().items():
        arguments = inspect.signature(getattr(library, name).__init__).parameters
        assert ("mini_batch_size" in arguments) == (row.plain is not None), name
        assert ("gather_across_devices" in arguments) == row.gathers, name
        if row.plain is not None:
            of_plain = inspect.signature(getattr(library, row.plain).__init__).parameters
            assert of_plain.keys() <= arguments.keys(), f"{name} computes what {row.plain} does"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"loss": "MultipleNegativeRankingLoss"}, "did you mean MultipleNegativesRankingLoss"),
        ({"loss": "SoftmaxLoss"}, "SoftmaxLoss is not simulated: it has a classifier"),
        ({"mini_batch_size": 8}, "use CachedMultipleNegativesRankingLoss, which computes the same"),
        ({"loss": "CoSENTLoss", "mini_batch_size": 8}, "CoSENTLoss is none: leave it out"),
        ({"loss": "CosineSimilarityLoss", "gather_across_devices": True}, "does not compare samples of several GPUs"),
        ({"loss": "TripletLoss", "negatives": 2}, "samples of TripletLoss have 1 negative"),
        ({"loss_kwargs": {"mini_batch_size": 8}}, "give it as sentence_transformers.mini_batch_size"),
    ],
)
def test_what_a_loss_does_not_have_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe(**spec)


@pytest.mark.parametrize(
    "setting",
    [
        {"eval_strategy": "steps"},
        {"save_strategy": "steps"},
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        {"torch_compile": True},
        {"label_smoothing_factor": 0.1},
        {"prompts": "query: "},
    ],
)
def test_settings_that_the_trainer_does_not_apply_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=next(iter(setting))):
        describe(setting)


def test_the_section_needs_its_loop() -> None:
    with pytest.raises(WorkloadError, match="needs loop: sentence_transformers"):
        Workload.from_mapping({"model": {"id": "gpt2"}, "sentence_transformers": {"loss": "CoSENTLoss"}})


def test_a_sample_has_as_many_texts_as_its_loss_compares() -> None:
    specs: list[dict[str, Any]] = [{}, {"negatives": 3}, {"loss": "TripletLoss"}]
    assert [sequences_of(describe(**spec)) for spec in specs] == [2, 5, 3]


def test_accumulation_does_not_stand_for_a_batch_whose_samples_are_compared() -> None:
    batch = {"per_device_train_batch_size": 8}
    assert compares_in_batch(describe(batch)) and not compares_in_batch(describe(batch, loss="CosineSimilarityLoss"))
    with pytest.raises(WorkloadError, match="compares the samples of a batch"):
        with_effective_batch_size([describe(batch)], 32)
    (found,) = with_effective_batch_size([describe(batch, loss="CosineSimilarityLoss")], 32)
    assert found.train.gradient_accumulation_steps == 4
