"""What Dynamo cannot keep in one graph: where it breaks it, compiles code again, and gives up."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from importlib import import_module
from typing import Any
from unittest import mock

from torch._dynamo.utils import counters

_SHOWN_CAUSES = 3
_OF_THIS_PROCESS = re.compile(r", \d{7,}(?=\))| at 0x[0-9a-f]+|(?<=file \")[^\"]*/")
"""Numbers of objects, addresses and folders, which say nothing to who reads the condition."""


class Recompilations:
    """What Dynamo compiled again from now on, and where it broke graphs."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._given_up: list[str] = []
        self._last_cause = ""
        self._breaks_before = _breaks()

    def count(self, stack: contextlib.ExitStack) -> None:
        """Count what Dynamo compiles again until ``stack`` closes."""
        convert_frame: Any = import_module("torch._dynamo.convert_frame")
        reasons, exceeds = convert_frame.get_and_maybe_log_recompilation_reasons, convert_frame.exceeds_recompile_limit

        def counted(*args: Any, **kwargs: Any) -> list[str]:
            found: list[str] = reasons(*args, **kwargs)
            self._last_cause = next((_cause(reason) for reason in found), "")
            self._counts.update([self._last_cause] if found else [])
            return found

        def noted(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
            found: tuple[bool, str] = exceeds(cache_size, compile_id)
            if found[0]:
                self._given_up.append(self._last_cause)
            return found

        stack.enter_context(mock.patch.object(convert_frame, "get_and_maybe_log_recompilation_reasons", counted))
        stack.enter_context(mock.patch.object(convert_frame, "exceeds_recompile_limit", noted))

    def notes(self) -> list[str]:
        """Return a note on broken graphs, and one on code that was compiled again."""
        notes = []
        if breaks := [reason for reason, count in _breaks().items() if count > self._breaks_before.get(reason, 0)]:
            reasons = "; ".join(dict.fromkeys(reason.splitlines()[0] for reason in breaks))
            notes.append(f"Dynamo breaks the model's graph, and Python runs in between: {reasons}")
        if self._given_up:
            limit = import_module("torch._dynamo.config").recompile_limit
            notes.append(
                f"Dynamo compiles no function more than {limit} times, and runs it eagerly from then on, in PyTorch as "
                f"here: {len(self._given_up)} calls, because this does not hold any more: {self._given_up[0]}"
            )
        elif self._counts:
            causes = "; ".join(list(self._counts)[:_SHOWN_CAUSES])
            times = self._counts.total()
            notes.append(f"Dynamo compiles again where a condition does not hold, {times} times: {causes}")
        return notes


def _cause(reason: str) -> str:
    """Return the condition that did not hold when Dynamo compiled code again, with nothing of this process."""
    line = next((line for line in reason.splitlines() if ": " in line), reason)
    cause = line.partition(": ")[2].partition("  #")[0].strip() or reason
    return _OF_THIS_PROCESS.sub("", cause)


def _breaks() -> dict[str, int]:
    return dict(counters["graph_break"])
