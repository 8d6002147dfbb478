"""Pages of trainings on several GPUs: each rank as measured and as predicted."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import validate
from measured import FULL, GIB, MIB
from rich.console import Console

from trainatomy import predict
from trainatomy.catalog.calibrations import parse
from trainatomy.errors import DeviceError, WorkloadError
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device import nvml as visible
from trainatomy.records.create import make_record
from trainatomy.records.store import Store
from trainatomy.reporters.json import FORMATS, measurement_to_json
from trainatomy.reporters.schema import schema_of
from trainatomy.reporters.text.gpus import calibration_page
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.results.measurement import RankMeasurement
from trainatomy.results.prediction import Prediction
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.schema import Workload

OTHER = replace(RankMeasurement.of(FULL), rank=1, device_bytes=8 * GIB + 512 * MIB, step_seconds=0.5)
TWO = replace(
    FULL,
    workload={**FULL.workload, "parallel": {"gpus": 2}},
    nccl_bytes=932 * MIB,
    synchronized_step_seconds=0.3,
    other_ranks=(OTHER,),
)


@pytest.fixture(scope="module")
def predicted() -> Prediction:
    config = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return predict(
        Workload.from_mapping(
            {
                "model": {"class": "LlamaForCausalLM", "config": config},
                "data": {"sequence_length": 8},
                "loop": "pytorch",
                "parallel": {"gpus": 2},
            }
        )
    )


def page(prediction: Prediction | None, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(measurement_page(TWO, prediction))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_each_rank_is_beside_its_prediction(predicted: Prediction, width: int) -> None:
    text = page(predicted, width)
    assert max(map(len, text.splitlines())) <= width
    lines = [line.strip() for line in text[text.index("Ranks") :].splitlines()]
    start = next(index for index, line in enumerate(lines) if line.startswith("rank 1, measured"))
    assert "8.50 GiB" in lines[start] and "500 ms" in lines[start]
    assert lines[start + 1].startswith("predicted") and "%" in lines[start + 2]
    assert "Rank 1 is predicted as rank 0" in text
    assert "500 ms per step in the slowest rank, 1" in text
    assert "32.0 samples/s, 16,384 tokens/s of all ranks together" in text
    assert "300 ms per step with the CPU waiting" in text
    assert "932 MiB" in lines[start - 3] and "outside of PyTorch's allocator" in text


def test_a_page_without_a_prediction_shows_the_ranks() -> None:
    text = page(None, 120)
    assert "rank 1, measured" in text and "predicted as rank 0" not in text


def test_json_has_the_gaps_of_each_rank(predicted: Prediction) -> None:
    found = json.loads(json.dumps(measurement_to_json(TWO, predicted)))
    validate(found, schema_of(FORMATS["measurement"]))
    expected = predicted.memory.device_bytes / OTHER.device_bytes - 1 if OTHER.device_bytes else None
    assert found["gap"]["ranks"]["1"]["device_bytes"] == pytest.approx(expected)
    assert found["other_ranks"][0]["rank"] == 1


def test_a_record_keeps_every_rank(tmp_path: Any, predicted: Prediction) -> None:
    store = Store(tmp_path)
    where = store.write(make_record(TWO, predicted, "trainatomy measure"))
    assert store.read(where).measurement == TWO


def test_a_calibration_shows_its_collectives() -> None:
    points = [
        {"kind": "all_reduce", "ranks": 2, "nodes": 1, "bytes": size, "seconds": seconds}
        for size, seconds in ((1024, 2e-5), (2**30, 3.28e-3))
    ]
    environment = {"gpu": "NVIDIA H200", "capability": [9, 0], "date": "2026-11-22", "driver": "580"}
    environment |= {"versions": {}, "processor": "Xeon"}
    content = {"schema": "trainatomy/calibration/1", "environment": environment}
    found = parse(json.dumps(content | {"sections": {"collectives": {"points": points}}}), "x.json")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(calibration_page(found, ()))
    (row,) = [line for line in console.export_text().splitlines() if "all_reduce" in line]
    assert " ".join(row.split()) == "all_reduce 2 GPUs 1.0 KiB in 20 µs 1.00 GiB in 3.3 ms 327.4"


def test_too_few_gpus_and_several_machines_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from fake_gpu import FakeNvml

    monkeypatch.setattr(nvml, "_library", lambda: FakeNvml(count=2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible.require_gpus(ParallelSpec(gpus=2)).startswith("2 × NVIDIA H200")
    with pytest.raises(DeviceError, match=r"parallel\.gpus: the training uses 4 GPUs, and this machine shows 2 "):
        visible.require_gpus(ParallelSpec(gpus=4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(DeviceError, match=r"shows 1, as CUDA_VISIBLE_DEVICES='1' says"):
        visible.require_gpus(ParallelSpec(gpus=2))
    with pytest.raises(WorkloadError, match=r"parallel\.nodes"):
        visible.require_gpus(ParallelSpec(gpus=2, nodes=2))
    with pytest.raises(WorkloadError, match=r"parallel\.gpus: a profile is of one GPU"):
        visible.refuse_several_gpus(ParallelSpec(gpus=2), "a profile is of")
