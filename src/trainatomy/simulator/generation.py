"""A call of ``generate()`` in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from trainatomy.results.operations import Operations


@dataclass(frozen=True, slots=True)
class ExecutedGeneration:
    """The last call of ``generate()``.

    Attributes:
        sequences: Sequences that were generated at once.
        cache_bytes: Keys and values at the end.
        cache_bytes_per_token: Keys and values of one token of one sequence.
        first_operations: Number of its operations before the second token.
    """

    sequences: int
    cache_bytes: int
    cache_bytes_per_token: int
    first_operations: int

    def prefill(self, operations: Operations) -> Operations:
        """Return those of a call's operations that come before the second token."""
        count = self.first_operations or len(operations.operations)
        whole = len(operations.operations) or 1
        calls = {phase: number * count // whole for phase, number in operations.module_calls.items()}
        return Operations(operations.calls, operations.operations[:count], calls, step=operations.step)
