"""The purpose of an allocation follows from its label, or from when it was made and freed."""

from __future__ import annotations

import pytest
from traces_by_hand import Hand, one_step

from trainatomy.analysis.memory import COMPONENTS
from trainatomy.analysis.purposes import LABELLED, Purpose, lifetimes, purposes
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
    hand = Hand()
    hand.take(512, phase, label)
    hand.mark(f"{phase} end")
    assert kinds(hand.trace) == [purpose]
    assert purpose[0] in COMPONENTS


def test_an_unknown_label_is_a_line_of_its_own() -> None:
    hand = Hand()
    hand.take(512, "forward", "cusolver_workspace")
    assert kinds(hand.trace) == [("functionality", "cusolver_workspace")]


def test_each_micro_step_has_its_own_end_of_forward() -> None:
    hand = Hand()
    first = hand.take(512)
    hand.mark("forward end")
    hand.give(first)  # backward of the first micro-step
    second = hand.take(512)
    hand.give(second)
    hand.mark("forward end")
    assert kinds(hand.trace) == [("activations", "saved for backward"), ("temporary", "forward")]


def test_freed_by_the_last_event_of_forward_is_not_saved() -> None:
    hand = Hand()
    freed, held = hand.take(512), hand.take(512)
    hand.give(freed)
    hand.mark("forward end")
    hand.give(held)
    assert [kind.component for kind in kinds(hand.trace)] == ["temporary", "activations"]


def test_recomputed_activations_are_a_separate_line() -> None:
    hand = Hand()
    hand.mark("recompute")
    passing, saved = hand.take(512, "recompute"), hand.take(512, "recompute")
    hand.give(passing)
    hand.mark("recompute end")
    hand.give(saved)
    assert kinds(hand.trace) == [("temporary", "forward"), ("activations", "saved by recomputation")]


def test_an_unfinished_forward_saves_what_is_never_freed() -> None:
    """After out of memory in the middle of a forward pass, what is held counts as saved for backward."""
    hand = Hand()
    hand.take(512)
    hand.give(hand.take(512))
    assert [kind.component for kind in kinds(hand.trace)] == ["activations", "temporary"]


def test_lifetimes_are_indices_of_events() -> None:
    hand = Hand()
    first, second = hand.take(512), hand.take(512)
    hand.give(second)
    lives = lifetimes(hand.trace)
    assert lives.born == [0, 1]
    assert lives.died[second] == 2
    assert lives.died[first] > len(hand.trace.events)
