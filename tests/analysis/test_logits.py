"""Which allocations hold logits or belong to the loss: in hand-written traces, where each has one reason."""

from __future__ import annotations

import pytest

from trainatomy.analysis.logits import logits_and_loss
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin

LOGITS, HIDDEN = 48_000, 1_536


def trace(*allocations: tuple[str, str, int], layers: frozenset[str] = frozenset({"body.head"})) -> AllocationTrace:
    """Return a trace of one step with allocations of these phases, modules and sizes; no phase begins a forward."""
    made = AllocationTrace(output_layers=set(layers), around_output_layers={"Model", "body"})
    for phase, module, size in allocations:
        if not phase:
            made.marks.append(Mark(len(made.events), "forward", 0))
            continue
        made.events.append(Event("alloc", len(made.origins), size))
        made.origins.append(Origin("aten::op", module, phase, 0))
    return made


BEGIN = ("", "", 0)
BEFORE = [BEGIN, ("forward", "Model", LOGITS), ("forward", "body.layer.0", LOGITS)]
MADE = [*BEFORE, ("forward", "body.head", LOGITS)]


@pytest.mark.parametrize(
    ("later", "counted"),
    [
        ([("forward", "Model", 2 * LOGITS), ("forward", "", 8), ("forward", "CrossEntropyLoss", LOGITS)], [3, 4, 5]),
        ([("forward", "MaskedCrossEntropy", LOGITS), ("forward", "Reward", 8)], [3, 4]),
        ([("forward", "body.head.base_layer", LOGITS)], [3]),
        ([("forward", "body.other", LOGITS)], []),
        ([("backward", "Model", 5), ("backward", "body.head", LOGITS), ("backward", "Model", HIDDEN)], [3]),
        ([("forward", "", LOGITS), ("backward", "", LOGITS), ("backward", "", LOGITS // 2)], [3, 4, 5]),
        ([("forward", "", LOGITS), ("backward", "", HIDDEN), ("backward", "", LOGITS)], [3]),
        ([("backward", "body.layer.0", 8), ("optimizer", "", LOGITS)], []),
        ([BEGIN, ("forward", "Model", LOGITS), ("forward", "body.head", LOGITS)], [4]),
    ],
    ids=[
        "loss",
        "other modules",
        "adapter",
        "other layer",
        "loss in backward",
        "no modules",
        "reached",
        "nothing",
        "next forward",
    ],
)
def test_they_are_what_lies_between_the_output_layer_and_its_gradient(
    later: list[tuple[str, str, int]], counted: list[int]
) -> None:
    assert logits_and_loss(trace(*MADE, *later)) == {2, *counted}


def test_labelled_allocations_and_models_without_logits_have_none() -> None:
    copied = trace(*MADE, ("forward", "body.head", LOGITS))
    copied.labels[3] = "weight_copy"
    assert logits_and_loss(copied) == {2}
    assert logits_and_loss(trace(*MADE, layers=frozenset())) == set()
