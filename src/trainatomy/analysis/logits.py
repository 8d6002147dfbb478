"""Which allocations hold logits, or belong to the loss that is computed from them.

They are what the output layer allocates in a forward pass, and what is allocated after it outside of the model's other
layers: casts, shifted copies and probabilities.  In the backward pass they are what is allocated before the gradient
reaches the output layer.  Where a backward pass has no modules, as in a measured trace, it is taken to have reached it
with the first allocation whose size is not that of an allocation in the loss, in the same precision, half or twice of
it; a 16-bit gradient of the output layer's weight counts too then if it happens to have such a size.

A loss that never makes logits, as Liger's, has none.
"""

from __future__ import annotations

from itertools import pairwise

from trainatomy.results.trace import AllocationTrace, Origin

_BEGINS = frozenset({"forward", "evaluation forward", "generation", "token"})
"""Marks at which a forward pass begins."""
_FORWARD = frozenset({"forward", "evaluation", "prefill", "decode"})
_BACKWARD = frozenset({"backward", "other"})
"""Phases of a backward pass; where accumulated losses are divided is in none."""
_PRECISIONS = (0.5, 1, 2)
"""Sizes of elements of other precisions, relative to those of a tensor."""


def logits_and_loss(trace: AllocationTrace) -> set[int]:
    """Return the numbers of the allocations that hold logits or belong to the loss; a finished trace keeps them."""
    key = "logits", len(trace.events)
    if key not in trace.replayed:
        trace.replayed[key] = _logits_and_loss(trace) if trace.output_layers else set()
    found: set[int] = trace.replayed[key]
    return found


def _logits_and_loss(trace: AllocationTrace) -> set[int]:
    begins = sorted({0, *(mark.event for mark in trace.marks if mark.name in _BEGINS)})
    found, modules, labels, origins = set[int](), _Modules(trace), trace.labels, trace.origins
    for begin, end in pairwise([*begins, len(trace.events)]):
        has = _Pass(modules).has
        found.update(
            number
            for action, number, size, _ in trace.events[begin:end]
            if action == "alloc" and number not in labels and has(origins[number], size)
        )
    return found


class _Modules(dict[str, tuple[bool, bool]]):
    """Whether a module is in an output layer, and whether it is outside (see ``_is_outside``), by its path."""

    def __init__(self, trace: AllocationTrace) -> None:
        super().__init__()
        self._layers, self._around = trace.output_layers, trace.around_output_layers

    def __missing__(self, module: str) -> tuple[bool, bool]:
        self[module] = found = self._is_in_layer(module), self._is_outside(module)
        return found

    def _is_in_layer(self, module: str) -> bool:
        return module in self._layers or any(module.startswith(f"{layer}.") for layer in self._layers)

    def _is_outside(self, module: str) -> bool:
        """Return whether code at work lies around the output layer, in no module, or in another than the model.

        Those are named by their class, such as that of a loss; a part of the model by the attribute that holds it.
        """
        is_another = "." not in module and module[:1].isupper()
        return not module or module in self._around or is_another


class _Pass:
    """Follows one forward pass from its output layer on, and the backward pass back to it."""

    def __init__(self, modules: _Modules) -> None:
        self._modules = modules
        self._is_after, self._is_back = False, False
        self._sizes = set[float]()

    def has(self, origin: Origin, size: int) -> bool:
        """Return whether the next allocation holds logits or belongs to the loss."""
        _, module, phase, _ = origin
        if phase in _FORWARD:
            is_layer, is_outside = self._modules[module]
            self._is_after = self._is_after or is_layer
            if is_layer or not self._is_after or not is_outside:
                return is_layer
            self._sizes.update(scale * size for scale in _PRECISIONS)
            return True
        if phase not in _BACKWARD or not self._is_after or self._is_back:
            return False
        self._is_back = not self._modules[module][1] if module else size not in self._sizes
        return not self._is_back
