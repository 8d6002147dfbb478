"""What pages and notes say of a training on several GPUs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from spread import workload

import trainatomy
from trainatomy.reporters.text.gpus import gpus_for_page
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.units import rate
from trainatomy.workload.schema import Workload

RESNET = {"class": "ResNetForImageClassification", "config": {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}}


@pytest.mark.parametrize(("gpus", "noted"), [(1, False), (2, True)])
def test_batch_norm_takes_its_statistics_on_each_gpu(gpus: int, noted: bool) -> None:
    described = Workload.from_mapping({"model": RESNET, "loop": "pytorch", "parallel": {"gpus": gpus}})
    assert any(note.startswith("BatchNorm takes its") for note in trainatomy.predict(described).notes) is noted


@pytest.mark.parametrize(
    ("gpus", "layerdrop", "noted"),
    [(1, 0.0, None), (1, 1e-9, "a step with all layers"), (2, 1e-9, "DDP raises an error")],
)
def test_layers_that_are_left_out_at_random_are_noted(gpus: int, layerdrop: float, noted: str | None) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    small = {"conv_dim": [8], "conv_kernel": [10], "conv_stride": [5], "num_conv_pos_embedding_groups": 2}
    model = {"class": "Wav2Vec2ForCTC", "config": {**sizes, **small, "vocab_size": 40, "layerdrop": layerdrop}}
    described = Workload.from_mapping({"model": model, "loop": "pytorch", "parallel": {"gpus": gpus}})
    notes = [note for note in trainatomy.predict(described, timed=False).notes if "LayerDrop" in note]
    assert notes == [] if noted is None else noted in notes[0]


@pytest.mark.parametrize(("gpus", "noted"), [(1, False), (2, True)])
def test_operations_are_those_of_one_rank(gpus: int, noted: bool) -> None:
    notes = trainatomy.ops(workload(gpus=gpus)).notes
    assert any(note.startswith("these are the operations of rank 0 of 2 GPUs") for note in notes) is noted


def test_throughput_by_kind_of_gpu_is_that_of_all_gpus() -> None:
    prediction = trainatomy.predict(workload(gpus=4))
    assert prediction.time is not None
    text = io.StringIO()
    row = ComparisonRow(prediction.name, prediction.workload, prediction)
    Console(file=text, width=120).print(gpus_for_page(Comparison((row,))))
    assert f" {rate(4 * prediction.time.samples_per_second)} " in text.getvalue()
