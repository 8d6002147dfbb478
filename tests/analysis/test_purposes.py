"""The purpose of an allocation follows from its label or from its lifetime."""

from __future__ import annotations

import pytest
from traces_by_hand import TraceBuilder, one_step

from trainatomy.analysis.memory import COMPONENTS, LABELLED, OTHER_COMPONENTS, Purpose, lifetimes, purposes
from trainatomy.results.trace import AllocationTrace


def kinds(trace: AllocationTrace) -> list[Purpose]:
    return purposes(trace, lifetimes(trace))


def test_everything_in_a_step_has_its_purpose() -> None:
    trace, numbers = one_step()
    found = {name: kinds(trace)[number] for name, number in numbers.items()}
    assert found == {
        "weight": ("weights", "parameters"),
        "kept by the loop": ("functionality", "kept by the loop"),
        "input": ("functionality", "inputs"),
        "passing": ("temporary", "forward"),
        "saved": ("activations", "saved for backward"),
        "saved too": ("activations", "saved for backward"),
        "gradient": ("gradients", "gradients"),
        "backward": ("temporary", "backward"),
        "state": ("optimizer_states", "optimizer states"),
        "optimizer": ("temporary", "optimizer"),
    }


@pytest.mark.parametrize(("label", "purpose"), LABELLED.items())
@pytest.mark.parametrize("phase", ["load", "forward", "recompute", "backward", "optimizer", "other"])
def test_a_label_takes_precedence_over_the_phase(label: str, purpose: tuple[str, str], phase: str) -> None:
    builder = TraceBuilder()
    builder.allocate(512, phase, label)
    builder.mark(f"{phase} end")
    assert kinds(builder.trace) == [purpose]
    assert purpose[0] in (*COMPONENTS, *OTHER_COMPONENTS)


def test_an_unknown_label_is_a_line_of_its_own() -> None:
    builder = TraceBuilder()
    builder.allocate(512, "forward", "cusolver_workspace")
    assert kinds(builder.trace) == [("functionality", "cusolver_workspace")]


def test_each_micro_step_has_its_own_end_of_forward() -> None:
    builder = TraceBuilder()
    first = builder.allocate(512)
    builder.mark("forward end")
    builder.free(first)  # backward of the first micro-step
    second = builder.allocate(512)
    builder.free(second)
    builder.mark("forward end")
    assert kinds(builder.trace) == [("activations", "saved for backward"), ("temporary", "forward")]


def test_freed_by_the_last_event_of_forward_is_not_saved() -> None:
    builder = TraceBuilder()
    freed, held = builder.allocate(512), builder.allocate(512)
    builder.free(freed)
    builder.mark("forward end")
    builder.free(held)
    assert [kind.component for kind in kinds(builder.trace)] == ["temporary", "activations"]


def test_recomputed_activations_are_a_separate_line() -> None:
    builder = TraceBuilder()
    builder.mark("recompute")
    passing, saved = builder.allocate(512, "recompute"), builder.allocate(512, "recompute")
    builder.free(passing)
    builder.mark("recompute end")
    builder.free(saved)
    assert kinds(builder.trace) == [("temporary", "forward"), ("activations", "saved by recomputation")]


def test_an_unfinished_forward_saves_what_is_never_freed() -> None:
    """Check that after out of memory in a forward pass the live allocations count as saved for backward."""
    builder = TraceBuilder()
    builder.allocate(512)
    builder.free(builder.allocate(512))
    assert [kind.component for kind in kinds(builder.trace)] == ["activations", "temporary"]


def test_lifetimes_are_indices_of_events() -> None:
    builder = TraceBuilder()
    first, second = builder.allocate(512), builder.allocate(512)
    builder.free(second)
    lives = lifetimes(builder.trace)
    assert lives.born == [0, 1]
    assert lives.died[second] == 2
    assert lives.died[first] > len(builder.trace.events)
