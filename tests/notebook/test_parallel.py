"""The guide's experiment on two GPUs: DataParallel, DDP, and DDP through host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from trainatomy import api
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.links import through_host
from trainatomy.catalog.published import parallel_runs
from trainatomy.cli.workloads import samples_of
from trainatomy.measurement.measure import task_of
from trainatomy.measurement.process.job import Job
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.comparison import Comparison
from trainatomy.results.prediction import total_rate
from trainatomy.runs.comparison import published
from trainatomy.workload.builtin import PARALLEL, ready


@cache
def small() -> Comparison:
    """The experiment with a model of two small layers."""
    rows = [
        row.replace({"model.config": {"n_layer": 2, "n_embd": 128, "n_head": 4}, "data.sequence_length": 32})
        for row in ready(PARALLEL, "2022")
    ]
    return api.compare(rows)


def test_the_rows_are_the_guides_three_runs() -> None:
    rows = ready(PARALLEL, "2022")
    assert [row.parallel.strategy for row in rows] == ["dp", None, None]
    assert [row.parallel.without_peer_access for row in rows] == [False, False, True]
    assert {row.parallel.world_size for row in rows} == {2}
    assert {row.resolve_gpu().id for row in rows} == {"titan-rtx"}
    runs = parallel_runs()
    steps = 200
    assert runs.samples == samples_of([PARALLEL]) == steps * sum(2 * row.batch_size for row in rows) // 3
    assert published(rows).rows[1].seconds == 101.9003


def test_published_ratios_are_shown_for_every_gpu() -> None:
    own, other = published(ready(PARALLEL, "2022")), published(ready(PARALLEL, gpu="h100"))
    assert [row.seconds for row in own.rows] == [row.seconds for row in other.rows]
    assert "another machine" in other.remark and "another machine" not in own.remark
    assert published(ready(PARALLEL, gpu="h100")[:2]).rows == ()


@pytest.mark.parametrize(
    ("gpu", "link"), [("titan-rtx", "pcie3-host"), ("a100-80gb", "pcie4-host"), ("h200", "pcie5-host")]
)
def test_the_link_through_host_memory_is_that_of_the_gpus_bus(gpu: str, link: str) -> None:
    assert through_host(find_gpu(gpu)) == link
    row = ready(PARALLEL, "2022", gpu)[2]
    found = row.parallel.links(row.resolve_gpu())
    assert found is not None and found.intra.id == link and not found.intra.buffers_on_gpu


def test_the_page_and_the_json_show_predicted_beside_published() -> None:
    comparison = small()
    shown = [row.prediction for row in comparison.rows]
    rows = ready(PARALLEL, "2022")
    known = published(rows)
    whole = Comparison(
        tuple(replace(row, published=figures) for row, figures in zip(comparison.rows, known.rows, strict=True)),
        known.source,
        known.remark,
        known.samples,
    )
    text = render(comparison_page(whole), width=120)
    assert "131.4 s (1.29)" in text and "error" in text and "2 × TITAN RTX" in text
    assert shown[1] is not None
    expected = 1600 / (total_rate(shown[1]) or 0.0)
    assert f"{expected:.1f} s" in text
    content = json.loads(json.dumps(to_json(whole)))["published"]
    assert content["seconds"] == [110.5948, 101.9003, 131.4367]
    assert content["memory_bytes"] == [None] * 3 and content["samples"] == 1600
    assert content["reversed"] == [[each.name for each in pair] for pair in whole.reversals()]


def test_ddp_without_peer_access_is_slower_than_with_it() -> None:
    rows = small().rows
    steps = [row.prediction.time.step_seconds for row in rows if row.prediction and row.prediction.time]
    assert len(steps) == 3 and steps[2] > steps[1]


def test_ranks_get_the_variable_that_switches_peer_access_off() -> None:
    direct, other = (task_of(Job(row.to_mapping())) for row in ready(PARALLEL)[1:3])
    assert (other.ranks, other.environment["NCCL_P2P_DISABLE"]) == (2, "1")
    assert "NCCL_P2P_DISABLE" not in direct.environment


def in_order(*seconds: float) -> Comparison:
    """The experiment with these predicted times of its rows."""
    comparison = small()
    rows = []
    for row, figures, each in zip(comparison.rows, published(ready(PARALLEL, "2022")).rows, seconds, strict=True):
        assert row.prediction is not None and row.prediction.time is not None
        time = replace(row.prediction.time, samples_per_second=800 / each)
        rows.append(replace(row, prediction=replace(row.prediction, time=time), published=figures))
    return replace(comparison, rows=tuple(rows), source="the guide", samples=1600)


@pytest.mark.parametrize(
    ("seconds", "pairs"),
    [
        ((110.0, 100.0, 130.0), []),
        ((110.0, 100.0, 105.0), [("DDP through host memory", "DataParallel")]),
        ((90.0, 100.0, 130.0), [("DataParallel", "DDP")]),
        ((110.0, 100.0, 90.0), [("DDP through host memory", "DataParallel"), ("DDP through host memory", "DDP")]),
    ],
)
def test_the_page_says_where_the_published_order_is_another(
    seconds: tuple[float, ...], pairs: list[tuple[str, str]]
) -> None:
    comparison = in_order(*seconds)
    assert sorted((first.name, second.name) for first, second in comparison.reversals()) == sorted(pairs)
    text = " ".join(render(comparison_page(comparison), width=100).split())
    for first, second in pairs:
        assert f"Predicted, {first} is faster than {second}; published, it was slower" in text
    assert ("it was slower" in text) is bool(pairs)
    assert ("at 3.4 GB/s at most" in text) is any("host memory" in name for pair in pairs for name in pair)
