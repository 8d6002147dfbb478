"""Totals over the operations of a step."""

from __future__ import annotations

import pytest
from operations_by_hand import array, call, product, step

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory, fold_layers
from trainatomy.analysis.operation_table import OperationTable, PredictedTime
from trainatomy.analysis.operations import bytes_by_group, claims
from trainatomy.reporters.sentences import claim_sentence
from trainatomy.results.trace import AllocationTrace, Event, Origin

MM = product(64, 64, 64)
RELU = call("relu", [array(64, 64)], [array(64, 64, storage=1)])
RELU_BACKWARD = call("threshold_backward", [array(64, 64), array(64, 64, storage=1)], [array(64, 64, storage=2)])
SORT = call("sort", [array(64)], [array(64, storage=1)])
VIEW = call("view", [array(4)], [array(4)], is_view=True)
PLAIN = step(
    (MM, "forward", "layer.0.linear"),
    (VIEW, "forward"),
    (RELU, "forward", "layer.0"),
    (MM, "forward", "layer.1.linear"),
    (SORT, "forward"),
    (RELU_BACKWARD, "backward", "layer.0"),
    (MM, "backward", "layer.0.linear", 4),
)


def test_groups_by_phase_add_up() -> None:
    found = {(row.phase, row.group): row for row in OperationTable(PLAIN).groups()}
    whole = found["step", "contraction"]
    assert (whole.operations, whole.flop) == (6, 6 * 2 * 64**3)
    assert whole.flop == found["forward", "contraction"].flop + found["backward", "contraction"].flop
    assert sum(row.flop_share for row in found.values() if row.phase == "backward") == pytest.approx(1)
    assert whole.intensity == pytest.approx(64**3 * 2 / (3 * 2 * 64 * 64))
    assert found["step", "normalisation"].operations == 0 and ("forward", "normalisation") not in found
    assert OperationTable(PLAIN).aside() == {"views": 1, "host": 0, "reads_by_host": 0, "transfers": 0}


def test_operators_without_a_formula_are_listed() -> None:
    (row,) = OperationTable(PLAIN).unformulated()
    assert (row.operation, row.calls, row.bytes) == ("aten::sort", 1, 2 * 2 * 64)


def test_heaviest_operations_fold_layers() -> None:
    first, *_ = OperationTable(PLAIN).heaviest(3)
    assert (first.operation, first.module, first.phase, first.calls) == ("aten::mm", "layer.*.linear", "backward", 4)
    assert len(OperationTable(PLAIN).heaviest(2)) == 2
    assert [fold_layers(path, root=True) for path in ("h.3.mlp", "0.mlp", "layer10")] == ["h.*.mlp", "*.mlp", "layer10"]


def test_predicted_and_measured_times() -> None:
    times = [
        PredictedTime(1.0, "arithmetic"),
        None,
        PredictedTime(2.0, "memory"),
        PredictedTime(3.0, "memory"),
        None,
        None,
        PredictedTime(5.0, "arithmetic"),
    ]
    measured = [None, None, 2.5, None, None, None, 1.0]
    found = {(row.phase, row.group): row for row in OperationTable(PLAIN, times, measured).groups()}
    whole = found["step", "contraction"]
    assert (whole.seconds, whole.bound_by, whole.measured_seconds) == (1 + 3 + 4 * 5, "arithmetic", 4.0)
    assert whole.seconds_share == pytest.approx(24 / 26) and whole.measured_share == pytest.approx(4 / 6.5)
    assert found["forward", "elementwise"].measured_seconds == 2.5
    assert OperationTable(PLAIN).groups()[0].seconds is None


def test_operations_outside_the_scope_are_left_out() -> None:
    kept = OperationTable(PLAIN, keep=[operation.phase == "backward" for operation in PLAIN.operations])
    assert kept.total().calls == 5 and {row.phase for row in kept.groups()} == {"step", "backward"}


def test_claims_about_backward_and_activation_functions() -> None:
    flop, activation = claims(OperationTable(PLAIN))
    assert flop.ratio == pytest.approx((4 * 2 * 64**3 + 64 * 64) / (2 * 2 * 64**3))
    assert activation.ratio == 1.5 and "relu, threshold_backward" in claim_sentence(activation)
    assert f"{flop.ratio:.2f} times the FLOP of forward (" in claim_sentence(flop)
    assert claims(OperationTable(step((MM, "forward")))) == ()


def test_peak_memory_by_group() -> None:
    origins = [
        ("load", "copy to device"),
        ("forward", "aten::mm"),
        ("forward", "aten::mm (scratch)"),
        ("forward", "aten::relu"),
    ]
    trace = AllocationTrace(origins=[Origin(name, "", phase, 0) for phase, name in origins], labels={0: "weight"})
    trace.events += [Event("alloc", 0, 10), Event("alloc", 1, 20), Event("alloc", 2, 40), Event("free", 2, 0)]
    trace.events += [Event("alloc", 3, 30), Event("free", 1, 0)]
    analysis = analyze_memory(trace, AllocatorSettings(), 2**30, 0)
    assert list(analysis.sizes) == [512, 512, 512, 512]
    assert analysis.held_at_peak == [0, 1, 2]
    sizes = [512, 1024, 2048, 1536]
    assert bytes_by_group(trace, [0, 1, 2], sizes) == {"contraction": 3072, "normalisation": 0, "elementwise": 0}
    assert analyze_memory(AllocationTrace(), AllocatorSettings(), 2**30, 0).held_at_peak == []
