"""One training on GPUs of several kinds: cost, table, chart, JSON, and the command's options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import jsonschema
import pytest
from rich.console import Console
from typer.testing import CliRunner

from trainatomy import compare_gpus
from trainatomy.cli.app import app
from trainatomy.reporters.charts.gpus import across_figure
from trainatomy.reporters.charts.style import drawing
from trainatomy.reporters.json import FORMATS, to_json
from trainatomy.reporters.schema import schema_of
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.prediction import Prediction
from trainatomy.workload.schema import Workload

TINY = {
    "model": {
        "class": "BertForSequenceClassification",
        "config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    },
    "data": {"sequence_length": 16},
    "train": {"per_device_train_batch_size": 2},
}


@pytest.fixture
def across(prediction: Prediction, too_big: Prediction, timed: Callable[[Prediction, float], Prediction]) -> Comparison:
    slow = timed(prediction, 0.5)
    fast = timed(replace(prediction, card=replace(prediction.gpu, id="fast", name="Fast GPU")), 0.25)
    rows = [ComparisonRow(each.gpu.name, {}, each) for each in (slow, fast, timed(too_big, 0.1))]
    rows.append(ComparisonRow("Old GPU", {}, None, "gpu: no bf16"))
    return Comparison(tuple(rows), is_across_gpus=True, costs_per_hour={slow.gpu.id: 1.8, "fast": 5.4})


def test_cost_is_price_over_throughput(across: Comparison) -> None:
    slow, fast, too_big, unpredicted = across.rows
    rate = slow.prediction.time.samples_per_second  # type: ignore[union-attr]
    assert across.cost_per_million_samples(slow) == pytest.approx(1.8 / 3600 / rate * 1e6)
    assert across.cost_per_million_samples(fast) == pytest.approx(1.5 * across.cost_per_million_samples(slow))  # type: ignore[operator]
    assert across.cost_per_million_samples(too_big) is None
    assert across.cost_per_million_samples(unpredicted) is None


def test_the_fastest_comes_first_and_what_does_not_fit_last(across: Comparison) -> None:
    assert across.fastest_first() == (across.rows[1], across.rows[0], across.rows[2])


def test_the_page_names_the_fastest_and_the_cheapest(across: Comparison) -> None:
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(comparison_page(across))
    text = " ".join(captured.get().split())
    assert f"the fastest is the Fast GPU, the cheapest per sample the {across.rows[0].name}" in text
    assert "Old GPU: gpu: no bf16" in text


def test_the_chart_has_a_panel_for_cost_only_with_prices(across: Comparison) -> None:
    with drawing():
        assert len(across_figure(across).axes) == 3
        assert len(across_figure(replace(across, costs_per_hour={})).axes) == 2


def test_json_follows_its_schema(across: Comparison) -> None:
    value = to_json(across)
    jsonschema.validate(json.loads(json.dumps(value)), schema_of(FORMATS["comparison"]))
    assert [row["cost_per_million_samples"] is None for row in value["rows"]] == [False, False, True, True]
    assert value["rows"][3]["prediction_error"] == "gpu: no bf16"
    assert "cost_per_million_samples" not in to_json(replace(across, costs_per_hour={}))["rows"][0]


def test_one_training_on_two_gpus() -> None:
    found = compare_gpus(Workload.from_mapping(TINY), ["h200", "t4"], costs_per_hour={"t4": 0.5})
    assert [row.prediction.gpu.id for row in found.rows if row.prediction] == ["h200", "t4"]
    assert found.cost_per_million_samples(found.rows[1]) is not None


@pytest.mark.parametrize("more", [["--measure"], ["--sweep", "per_device_train_batch_size=1,2"]])
def test_several_gpus_exclude(more: list[str]) -> None:
    result = CliRunner().invoke(app(), ["compare", "notebook", "--gpu", "h200,t4", *more])
    assert result.exit_code == 2
    assert "cannot be combined" in result.output


def test_several_gpus_are_for_one_training() -> None:
    result = CliRunner().invoke(app(), ["compare", "notebook", "--gpu", "h200,t4"])
    assert result.exit_code == 2
    assert "GPUs are compared for one" in " ".join(re.findall(r"\w+", result.output))
