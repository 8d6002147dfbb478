"""Memory held at one instant by component, line and module."""

from __future__ import annotations

import pytest
from traces_by_hand import MIB, TraceBuilder, one_step

from trainatomy.analysis.detail import component_bytes_over_time
from trainatomy.analysis.memory import (
    COMPONENTS,
    activations_by_module,
    breakdown_lines,
    bytes_by_component,
    fold_layers,
    held_after,
    lifetimes,
    purposes,
)
from trainatomy.results.memory import Line, ModuleActivations


def test_live_after_an_event_includes_the_event() -> None:
    builder = TraceBuilder()
    first, second = builder.allocate(512), builder.allocate(512)
    builder.free(first)
    builder.empty_cache()
    assert [held_after(builder.trace, event) for event in range(-1, 4)] == [[], [0], [0, 1], [second], [second]]


def test_components_sum_to_the_live_bytes() -> None:
    trace, numbers = one_step()
    kinds = purposes(trace, lifetimes(trace))
    sizes = [event.bytes for event in trace.events if event.action == "alloc"]
    held = [numbers[name] for name in ("weight", "saved", "saved too", "passing")]
    totals = bytes_by_component(held, kinds, sizes)
    assert list(totals) == list(COMPONENTS)
    nothing = {"optimizer_states": 0, "gradients": 0, "functionality": 0}
    assert totals == {"weights": 4 * MIB, "activations": 8 * MIB, "temporary": 2 * MIB, **nothing}


def test_lines_are_ordered_by_component_and_size() -> None:
    builder = TraceBuilder()
    for size, label in [
        (512, "input"),
        (1024, "buffer"),
        (4096, "weight"),
        (2048, "weight"),
        (8192, "cublas_workspace"),
    ]:
        builder.allocate(size, "load", label)
    kinds = purposes(builder.trace, lifetimes(builder.trace))
    assert breakdown_lines(range(5), kinds, [512, 1024, 4096, 2048, 8192]) == (
        Line("weights", "parameters", 6144, 2),
        Line("weights", "buffers", 1024, 1),
        Line("functionality", "cuBLAS workspaces", 8192, 1),
        Line("functionality", "inputs", 512, 1),
    )


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("encoder.layer.7.attention", "encoder.layer.*.attention"),
        ("h.11", "h.*"),
        ("stages.0.blocks.3.mlp.2", "stages.*.blocks.*.mlp.*"),
        ("layer1.conv2", "layer1.conv2"),
        ("0", "0"),
        ("", ""),
    ],
)
def test_layers_are_folded(path: str, short: str) -> None:
    assert fold_layers(path) == short


def test_only_activations_are_split_by_module() -> None:
    trace, numbers = one_step()
    kinds = purposes(trace, lifetimes(trace))
    sizes = [event.bytes for event in trace.events if event.action == "alloc"]
    held = list(numbers.values())
    assert activations_by_module(trace, held, kinds, sizes) == (
        ModuleActivations("encoder.layer.*.output", 8 * MIB, 2),
    )


def test_bytes_over_time_match_the_live_bytes() -> None:
    trace, _ = one_step()
    kinds = purposes(trace, lifetimes(trace))
    sizes = [event.bytes for event in trace.events if event.action == "alloc"]
    for index, totals in component_bytes_over_time(trace, kinds, sizes, start=3):
        assert index >= 3
        assert totals == bytes_by_component(held_after(trace, index), kinds, sizes)
