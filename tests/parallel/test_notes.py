"""What a prediction on several GPUs says about the model."""

from __future__ import annotations

import pytest

import trainatomy
from trainatomy.workload.schema import Workload

RESNET = {"class": "ResNetForImageClassification", "config": {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}}


@pytest.mark.parametrize(("gpus", "noted"), [(1, False), (2, True)])
def test_batch_norm_takes_its_statistics_on_each_gpu(gpus: int, noted: bool) -> None:
    workload = Workload.from_mapping({"model": RESNET, "loop": "pytorch", "parallel": {"gpus": gpus}})
    assert any(note.startswith("BatchNorm takes its") for note in trainatomy.predict(workload).notes) is noted
