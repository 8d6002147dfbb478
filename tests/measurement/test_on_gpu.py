"""A training measured on the GPU of this machine agrees with its prediction (skipped without CUDA)."""

from __future__ import annotations

import pytest

import trainatomy
from trainatomy.workload.schema import Workload


@pytest.mark.gpu
def test_a_small_training_allocates_what_was_predicted() -> None:
    config = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    workload = Workload.from_mapping(
        {
            "name": "small",
            "model": {"class": "BertForSequenceClassification", "config": config},
            "data": {"sequence_length": 128},
            "train": {"per_device_train_batch_size": 8},
        }
    )
    measured = trainatomy.measure(workload)
    assert measured.status == "completed", measured.message
    predicted = trainatomy.predict(workload).memory.peak_allocated_bytes
    assert measured.peak_allocated_bytes == pytest.approx(predicted, rel=0.01)
