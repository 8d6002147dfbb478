"""Memory and time of a call of ``generate()``, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generation:
    """A call of ``generate()``.

    Attributes:
        prompts: Number of prompts.
        sequences: Sequences that are generated at once: prompts times beams, or times returned sequences.
        new_tokens: Tokens generated for each.
        cache_bytes: Keys and values at the end.
        cache_bytes_per_token: Keys and values of one token of one sequence.
        first_token_seconds: Time to the first token: the prompts and the choice of a token; None if it was not asked
            for.
        token_seconds: Mean time of each further token; None also for a single token.
    """

    prompts: int
    sequences: int
    new_tokens: int
    cache_bytes: int
    cache_bytes_per_token: int
    first_token_seconds: float | None = None
    token_seconds: float | None = None
