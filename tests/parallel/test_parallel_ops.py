"""The operations of a training on several GPUs: what is sent, and what is copied to be sent."""

from __future__ import annotations

import pytest
from executed import simulated
from spread import HIDDEN, VOCABULARY, weight_bytes, workload

from trainatomy.api.detailing import ops
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.counts import count
from trainatomy.operators.operator import GROUPS
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.operations import OperationBreakdown
from trainatomy.timing.cost_model import cost_model_of
from trainatomy.workload.schema import Workload


def test_copies_of_fsdp2_move_each_byte_once_in_and_once_out() -> None:
    found = simulated(workload(gpus=2, strategy="fsdp2"))
    chip = cost_model_of(find_gpu("h200")).chip
    moved: dict[str, int] = {}
    for one in found.operations.operations:
        call = found.operations.calls[one.call]
        if call.name.startswith("fsdp::"):
            name = call.name.removeprefix("fsdp::")
            moved[name] = moved.get(name, 0) + count(call).bytes
            assert kernel_work(call, chip).bytes == count(call).bytes
    weights = weight_bytes(found)
    layers = (
        weights - (2 * VOCABULARY + 1) * HIDDEN * 4
    )  # the root is gathered once, the layers in forward and backward
    gathered = weights + layers
    assert moved.get("chunk_cat_mixed_dtype", moved.get("chunk_cat")) == 2 * weights  # its name since torch 2.15
    assert moved["split_with_sizes_copy"] == 2 * gathered
    assert moved["all_gather_copy_in"] == gathered  # a half of it, read and written


def test_operations_show_what_is_sent_between_gpus() -> None:
    breakdown = ops(workload(gpus=2, strategy="fsdp2"))
    found = {one.kind: one for one in breakdown.collectives}
    assert set(found) == {"all_gather", "reduce_scatter", "all_reduce"}
    share = found["reduce_scatter"]
    assert (share.ranks, share.bytes) == (2, breakdown_weights(breakdown))
    assert share.seconds is not None and share.bus_bytes_per_second == pytest.approx(share.bytes / 2 / share.seconds)
    (whole,) = [row for row in breakdown.groups if (row.phase, row.group) == ("step", "communication")]
    assert whole.seconds == pytest.approx(sum(one.seconds or 0.0 for one in breakdown.collectives))
    assert not breakdown.by_rule or not any("fsdp" in name for name in breakdown.by_rule)
    text = render(operations_page(breakdown), width=120)
    assert "Communication between GPUs" in text and "reduce-scatter" in text
    alone = ops(workload())
    assert alone.collectives == () and {row.group for row in alone.groups} == set(GROUPS)


def breakdown_weights(breakdown: OperationBreakdown) -> int:
    return weight_bytes(simulated(Workload.from_mapping(breakdown.workload)))
