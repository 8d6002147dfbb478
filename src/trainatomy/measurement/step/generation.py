"""Time the tokens of ``generate()``, which waits for the GPU after each token by itself."""

from __future__ import annotations

import time
from statistics import median

import torch


class GenerationTimes:
    """Seconds to the first token and per further token of each call of ``generate()``.

    Attributes:
        cache: Number of sequences in the cache, its bytes, and those of one token of one sequence.
        tokens: Tokens that the last call generated.
    """

    def __init__(self) -> None:
        self.cache = (0, 0, 0)
        self.tokens = 0
        self._moments: list[float] = []
        self._first: list[float] = []
        self._further: list[float] = []

    def began(self, tokens: int) -> None:
        """Begin a call that generates ``tokens`` tokens."""
        self.tokens, self._moments = tokens, [time.perf_counter()]

    def first_token(self) -> None:
        """Note that the first token is known: the CPU has read whether it is the last."""
        self._moments.append(time.perf_counter())

    def ended(self) -> None:
        """End a call."""
        torch.cuda.synchronize()
        self._moments.append(time.perf_counter())
        self._first.append(self._moments[1] - self._moments[0])
        if len(self._moments) == 3:
            self._further.append((self._moments[2] - self._moments[1]) / (self.tokens - 1))

    def first_token_seconds(self, warm_up: int) -> float | None:
        """Return the median time to the first token after ``warm_up`` calls; None without one."""
        return median(self._first[warm_up:]) if self._first[warm_up:] else None

    def token_seconds(self, warm_up: int) -> float | None:
        """Return the median time of a further token after ``warm_up`` calls; None without one."""
        return median(self._further[warm_up:]) if self._further[warm_up:] else None
