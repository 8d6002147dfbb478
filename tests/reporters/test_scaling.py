"""Comparisons over plans of parallelism: totals, efficiency, names, table, chart and JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from snapshots import compare
from test_json import check

from trainatomy.reporters import search_sentences
from trainatomy.reporters.charts import scaling as chart
from trainatomy.reporters.charts.comparison import draw
from trainatomy.reporters.charts.style import drawing
from trainatomy.reporters.json import to_json
from trainatomy.reporters.settings import plan_name
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.comparison import Comparison, ComparisonRow, Spread
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Plan, Prediction, RankPrediction

MIB = 2**20
MakeRow = Callable[..., ComparisonRow]


@pytest.fixture
def row(prediction: Prediction, timed: Callable[[Prediction, float], Prediction]) -> MakeRow:
    def make(rate: float, fits: bool = True, batch: int = 4, **parallel: Any) -> ComparisonRow:
        strategy = f", strategy={parallel['strategy']}" if "strategy" in parallel else ""
        name = f"gpus={parallel.get('gpus', 1)}{strategy}"
        workload: dict[str, Any] = {"name": name, "model": {"id": "m"}, "loop": "pytorch", "parallel": parallel}
        workload["train"] = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 64 // batch}
        made = replace(timed(prediction, 4 / rate), name=name, workload=workload, fits=fits)
        if not fits:
            made = replace(made, verdict="does not fit")
        return ComparisonRow(name, workload, made)

    return make


@pytest.fixture
def comparison(row: MakeRow) -> Comparison:
    return Comparison(
        (
            row(10, batch=1),
            row(9, gpus=4),
            row(8, gpus=4, strategy="fsdp2"),
            row(5, gpus=8, batch=8),
            row(7, fits=False, gpus=8, strategy="fsdp2", batch=8),
        )
    )


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ({}, "1 GPU"),
        ({"loop": "pytorch", "parallel": {"gpus": 8}}, "DDP, 8 GPUs"),
        ({"loop": "pytorch", "parallel": {"gpus": 8, "nodes": 2, "strategy": "fsdp2"}}, "FSDP2, 2 nodes × 8"),
        (
            {"loop": "pytorch", "parallel": {"gpus": 8, "nodes": 2, "strategy": "fsdp2", "dp_shard_size": 8}},
            "FSDP2 with 2 replicas, 2 nodes × 8",
        ),
        ({"loop": "pytorch", "parallel": {"gpus": 8, "strategy": "fsdp2", "tp_size": 4}}, "FSDP2 × TP 4, 8 GPUs"),
        ({"loop": "pytorch", "parallel": {"gpus": 8, "tp_size": 8}}, "TP 8, 8 GPUs"),
        ({"parallel": {"gpus": 2}}, "DDP, 2 GPUs"),
        ({"parallel": {"gpus": 2}, "train": {"fsdp": True}}, "FSDP2, 2 GPUs"),
        ({"parallel": {"gpus": 2}, "train": {"fsdp": True, "fsdp_config": {"version": 1}}}, "FSDP1, 2 GPUs"),
    ],
)
def test_a_plan_has_a_short_name(workload: dict[str, Any], name: str) -> None:
    assert plan_name(Plan.of(workload)) == name


def test_throughput_is_that_of_all_gpus_and_scaling_that_of_each(comparison: Comparison) -> None:
    found = comparison.scaling()
    assert [each and each.samples_per_second for each in found] == [10, 36, 32, 40, None]
    assert [each and each.efficiency for each in found] == [1.0, 0.9, 0.8, 0.5, None]


def test_tensor_parallel_ranks_process_the_same_samples(row: MakeRow) -> None:
    (found,) = Comparison((row(10, gpus=8, tp_size=4, strategy="fsdp2"),)).scaling()
    assert found is not None and found.samples_per_second == 20 and found.samples_per_second_per_gpu == 2.5
    assert found.efficiency is None


def test_other_trainings_are_no_reference(row: MakeRow) -> None:
    other = row(10)
    other = replace(other, workload={**other.workload, "model": {"id": "another"}})
    one, two, four = Comparison((other, row(4, gpus=2), row(3, gpus=4))).scaling()
    assert one and two and four
    assert (one.efficiency, two.efficiency, four.efficiency) == (None, 1.0, 0.75)


def test_the_table_at_two_widths(comparison: Comparison) -> None:
    compare(comparison_page(comparison), "scaling")


def test_the_table_shows_the_fullest_rank(row: MakeRow) -> None:
    plain = row(9, gpus=2)
    assert plain.prediction is not None
    memory = plain.prediction.memory
    fuller = RankPrediction(1, True, "tight", 0, replace(memory, device_bytes=12 * 2**30), (), None)
    made = replace(plain, prediction=replace(plain.prediction, other_ranks=(fuller,)))
    text = render(comparison_page(Comparison((made,))), 120)
    assert "tight" in text and "12.0 GiB" in text


def test_the_chart_has_a_line_for_each_strategy_and_ideal_scaling(comparison: Comparison) -> None:
    with drawing():
        page = chart.figure(comparison)
    memory, throughput = page.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in throughput.lines}
    assert [line.get_label() for line in memory.lines if not str(line.get_label()).startswith("_")] == ["DDP", "FSDP2"]
    points = [line.get_xydata().tolist() for line in throughput.lines]
    assert [[1, 10], [4, 36], [8, 40]] in points
    assert [[1, 10], [4, 32]] in points  # FSDP2 on 8 GPUs does not fit
    assert lines["ideal scaling"] == [[1, 10], [8, 80]]
    assert memory.lines[1].get_xydata().tolist()[-1] == [8, 8]


def test_the_chart_by_gpus_is_for_one_training_on_several_numbers(comparison: Comparison, row: MakeRow) -> None:
    assert chart.is_by_gpus(comparison)
    assert not chart.is_by_gpus(Comparison(comparison.rows[1:3]))
    other = row(3, gpus=2)
    assert other.prediction is not None
    changed = {**other.workload, "model": {"id": "another"}}
    mixed = replace(other, workload=changed, prediction=replace(other.prediction, workload=changed))
    assert not chart.is_by_gpus(Comparison((*comparison.rows, mixed)))
    assert draw(comparison, "svg") == draw(comparison, "svg") != draw(Comparison(comparison.rows[1:3]), "svg")


def test_json_has_plan_and_scaling(comparison: Comparison) -> None:
    value = to_json(comparison)
    check(value, "comparison")
    rows = value["rows"]
    assert rows[1]["plan"] == {
        "name": "DDP, 4 GPUs", "strategy": "ddp", "gpus": 4, "nodes": 1, "replicas": 1, "tp_size": 1,
        "model_parallel_size": 1, "pp_size": 1, "cp_size": 1,
    }  # fmt: skip
    assert rows[1]["scaling"] == {"samples_per_second": 36, "samples_per_second_per_gpu": 9, "efficiency": 0.9}
    assert rows[4]["scaling"] is None


def test_measured_throughput_is_that_of_all_gpus(row: MakeRow, measurement: Measurement) -> None:
    measured = replace(row(9, gpus=4), measurements=(replace(measurement, samples_per_second=8.0),))
    text = render(comparison_page(Comparison((measured,))), 120)
    assert "32.0" in text and measured.total_rate == Spread(32, 32, 32, 1)
    assert "36.0 samples/s predicted, 32.0 measured (-11.1 %)" in search_sentences.measured_throughput(measured)
