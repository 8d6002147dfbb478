"""The operation breakdown as a page and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from trainatomy.api import ops
from trainatomy.cli import main
from trainatomy.reporters.json import FORMATS, to_json
from trainatomy.reporters.schema import schema_of
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.operations import Joined, OperationBreakdown, Padding
from trainatomy.workload.builtin import encoder_layer


@pytest.fixture(scope="module")
def anatomy() -> OperationBreakdown:
    return ops(encoder_layer(), top=4)


@pytest.fixture(scope="module")
def timed(anatomy: OperationBreakdown) -> OperationBreakdown:
    """Return the breakdown with predicted and measured times."""
    groups = tuple(
        replace(row, seconds=1e-3, seconds_share=0.5, measured_seconds=2e-3, measured_share=0.25, bound_by="memory")
        for row in anatomy.groups
    )
    heaviest = tuple(replace(row, seconds=5e-5, measured_seconds=1.5e-3) for row in anatomy.heaviest)
    shapes = tuple(replace(row, gain_seconds=2e-5) for row in anatomy.shapes)
    modules = tuple(replace(row, seconds=3e-4, measured_seconds=3.25e-3) for row in anatomy.modules)
    padding = Padding(50257, 50304, 64, 3, ("lm_head",), "model.config.vocab_size", 50257, 50304, "vocab", 1, 1e-1)
    joined = Joined(50, 52, 0.9, 1.0, {"aten::zeros": 2}, {"aten::topk": 1})
    return replace(
        anatomy,
        groups=groups,
        heaviest=heaviest,
        modules=modules,
        shapes=shapes,
        paddings=(padding,),
        seconds=1.0,
        measured_seconds=2.0,
        joined=joined,
    )


@pytest.mark.parametrize("width", [80, 120])
def test_pages_keep_their_width_and_cut_nothing(
    anatomy: OperationBreakdown, timed: OperationBreakdown, width: int
) -> None:
    for one in (anatomy, timed):
        page = render(operations_page(one), width)
        assert max(map(len, page.splitlines())) <= width
        assert "…" not in page


def test_the_page_matches_the_value(anatomy: OperationBreakdown) -> None:
    page = render(operations_page(anatomy), 120)
    assert "encoder layer on V100 16 GB (SXM2): 55 operations in one step, 336 GFLOP" in page
    assert "99.79 %" in page and "Published: Ivanov" in page
    assert "Backward takes 2.00 times the FLOP of forward" in page
    untimed = render(operations_page(replace(anatomy, seconds=None)), 120)
    assert "GPU time by group" in page and "GPU time by group" not in untimed


def test_times_are_shown_where_they_are_known(timed: OperationBreakdown) -> None:
    page = render(operations_page(timed), 120)
    assert "GPU time by group" in page and "1.00 ms" in page and "memory" in page
    assert "50 of 52 predicted operations were found in the profile, with 90.0 % of its" in page
    assert "only measured: aten::topk (once)" in page


def test_modules_are_shown_with_both_times(timed: OperationBreakdown) -> None:
    page = render(operations_page(timed), 80)
    body = page.partition("Heaviest modules")[2].partition("Rules of the guides")[0]
    assert "predicted  measured" in body and "300 µs" in body and "3.25 ms" in body
    assert timed.modules[0].module in body


def test_padding_advice_names_the_setting_and_a_comparison(timed: OperationBreakdown) -> None:
    page = render(operations_page(timed), 120)
    assert (
        "model.config.vocab_size: 50304: 50,257 becomes 50,304 in 3 products of lm_head, predicted to save 100" in page
    )
    assert "--sweep model.config.vocab_size=50257,50304" in page


def test_json_follows_the_schema(anatomy: OperationBreakdown, timed: OperationBreakdown) -> None:
    schema = schema_of(FORMATS["operations"])
    for one in (anatomy, timed):
        jsonschema.validate(json.loads(json.dumps(to_json(one))), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**to_json(anatomy), "flop": "many"}, schema)


def test_the_timing_model_fills_in_the_times(anatomy: OperationBreakdown) -> None:
    rows = [row for row in anatomy.groups if row.phase == "step"]
    assert anatomy.seconds is not None
    assert sum(row.seconds or 0.0 for row in rows) == pytest.approx(anatomy.seconds)
    assert rows[0].bound_by == "arithmetic" and rows[2].bound_by == "memory bandwidth"
    assert anatomy.measured_seconds is None


def test_memory_at_the_peak_is_part_of_it(anatomy: OperationBreakdown) -> None:
    held = {row.group: row.peak_bytes for row in anatomy.groups if row.phase == "step"}
    assert all(size is not None and size > 2**20 for size in held.values())


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "encoder-layer", "--gpu", "h200", "--top", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["card"], len(found["heaviest"])) == ("trainatomy/operations/1", "h200", 2)
