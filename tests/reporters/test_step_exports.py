"""Exports of a predicted step and of records: each is read back as its readers do."""

from __future__ import annotations

import json
import pickle
import pickletools
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from trainatomy import api
from trainatomy.reporters.viewers import memory_snapshot, openmetrics, step_trace
from trainatomy.results.prediction import Prediction
from trainatomy.results.record import History, Summary
from trainatomy.results.trace import Detail
from trainatomy.workload.schema import Workload

TINY = {
    "model": {
        "id": "google-bert/bert-base-uncased",
        "class": "BertForSequenceClassification",
        "config": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2},
    },
    "data": {"sequence_length": 32},
    "train": {"per_device_train_batch_size": 4, "bf16": True, "gradient_accumulation_steps": 2},
    "gpu": "h200",
}
VIEWER_READS = frozenset(
    "APPEND APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE PROTO "
    "SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE2 NEWFALSE NEWTRUE BINUNICODE EMPTY_TUPLE NONE BINFLOAT".split()
)
"""Opcodes that torch/utils/viz/MemoryViz.js reads, of those that Python writes."""


@pytest.fixture(scope="module", params=["", "expandable_segments:True"])
def predicted(request: pytest.FixtureRequest) -> tuple[Prediction, Detail]:
    return api.predict_in_detail(Workload.from_mapping({**TINY, "allocator": request.param}))


def allocated_over_time(detail: Detail) -> list[int]:
    changes = [0] * (detail.events + 1)
    for one in detail.allocations:
        changes[one.born] += one.bytes
        if one.died >= 0:
            changes[one.died] -= one.bytes
    return [sum(changes[: event + 1]) for event in range(0, detail.events, 7)] + [sum(changes[: detail.peak_event + 1])]


def test_the_detail_is_that_of_the_prediction(predicted: tuple[Prediction, Detail]) -> None:
    prediction, detail = predicted
    memory = prediction.memory
    assert max(allocated_over_time(detail)) == memory.peak_allocated_bytes
    reserved = most = 0
    for one in detail.segment_events:
        reserved += one.bytes if one.action in ("segment_alloc", "segment_map") else -one.bytes
        most = max(most, reserved)
    assert most == memory.peak_reserved_bytes
    assert prediction.time is not None
    assert detail.step_seconds == pytest.approx(prediction.time.step_seconds, rel=1e-9)
    held = [one for one in detail.allocations if one.born <= detail.peak_event < (one.died if one.died >= 0 else 10**9)]
    weights = sum(one.bytes for one in held if detail.sources[one.source].component == "weights")
    assert weights == memory.components.weights


def test_no_two_allocations_share_an_address(predicted: tuple[Prediction, Detail]) -> None:
    _, detail = predicted
    starts = {one.born: one for one in detail.allocations}
    ends = {one.died: one for one in detail.allocations if one.died >= 0}
    live: dict[int, int] = {}
    for event in range(detail.events):
        if event in ends:
            del live[ends[event].address]
        if event in starts:
            one = starts[event]
            assert all(one.address + one.bytes <= at or at + size <= one.address for at, size in live.items())
            live[one.address] = one.bytes


def test_pytorch_reads_the_snapshot(predicted: tuple[Prediction, Detail]) -> None:
    from torch.cuda import _memory_viz

    prediction, detail = predicted
    snapshot = pickle.loads(memory_snapshot(detail))
    assert "segments:" in _memory_viz.segsum(snapshot)
    assert "aten::" not in _memory_viz.trace(snapshot)[:50]
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert 0 < reserved <= prediction.memory.peak_reserved_bytes


def test_entries_lie_in_the_segments_that_exist_then(predicted: tuple[Prediction, Detail]) -> None:
    _, detail = predicted
    snapshot = pickle.loads(memory_snapshot(detail))
    pages: dict[int, int] = {}
    live: dict[int, int] = {}
    for entry in snapshot["device_traces"][0]:
        at, size = entry["addr"], entry["size"]
        if entry["action"] in ("segment_alloc", "segment_map"):
            pages[at] = size
        elif entry["action"] in ("segment_free", "segment_unmap"):
            pages.pop(at, None)
        elif entry["action"] == "alloc":
            assert any(begin <= at < begin + length for begin, length in pages.items())
            live[at] = size
        elif entry["action"] == "free_completed":
            assert live.pop(at) == size
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert {each["address"]: each["requested_size"] for each in blocks if each["state"] == "active_allocated"} == live


def test_the_viewer_reads_the_snapshot(predicted: tuple[Prediction, Detail]) -> None:
    content = memory_snapshot(predicted[1])
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= VIEWER_READS
    categories = {entry["category"] for entry in pickle.loads(content)["device_traces"][0]}
    assert "unknown" in categories  # without it the viewer fails
    assert "activations" in categories


def test_the_trace_has_the_times_of_the_step(predicted: tuple[Prediction, Detail]) -> None:
    prediction, detail = predicted
    events = json.loads(step_trace(prediction, detail))["traceEvents"]
    assert prediction.time is not None
    kernels = [one for one in events if one["ph"] == "X" and one["tid"] >= 2]
    assert sum(one["dur"] for one in kernels) / 1e6 == pytest.approx(prediction.time.gpu_seconds, rel=1e-3)
    assert max(one["ts"] + one["dur"] for one in kernels) / 1e6 <= prediction.time.step_seconds * (1 + 1e-6)
    for before, after in pairwise(kernels):
        assert after["ts"] >= before["ts"] + before["dur"] - 0.01  # one stream: one after the other
    phases = [one["name"] for one in events if one["ph"] == "X" and one["tid"] == 0]
    passes = [name for name in phases if name in ("forward", "backward")]
    assert passes == ["forward", "backward", "forward", "backward"]
    memory = [sum(one["args"].values()) for one in events if one["ph"] == "C"]
    assert max(memory) == prediction.memory.peak_allocated_bytes


def test_a_trace_needs_times(predicted: tuple[Prediction, Detail]) -> None:
    prediction, detail = predicted
    with pytest.raises(ValueError, match="needs predicted times"):
        step_trace(prediction, replace(detail, timed=()))


def test_records_as_openmetrics() -> None:
    one = Summary(
        "20261121T120000Z-x-1", "f.json", "2026-11-21T12:00:00Z", 'a "b"\\c', "NVIDIA H200", "completed", "", 0, "k",
        8 * 2**30, 9 * 2**30, 0.125, 0.25, None,
    )  # fmt: skip
    text = openmetrics(History("records", (one, replace(one, id="2", status="out of memory", device_bytes=None)), ()))
    assert text.endswith("# EOF\n")
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    for line in samples:
        assert re.fullmatch(r'[a-z_]+\{(\w+="([^"\\\n]|\\["\\n])*",?)+\} -?[\d.e+-]+ 1795262400', line), line
    assert sum(line.startswith("trainatomy_device_memory_bytes{") for line in samples) == 1
    assert [line.split()[-2] for line in samples if line.startswith("trainatomy_out_of_memory")] == ["0", "1"]
    families = re.findall(r"# TYPE (\w+) gauge", text)
    assert all(line.split("{")[0] in families for line in samples)
    for name, unit in re.findall(r"# UNIT (\w+) (\w+)", text):
        assert name.endswith(f"_{unit}")
