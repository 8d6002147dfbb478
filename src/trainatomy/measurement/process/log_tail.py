"""The end of a process's log: its last lines, and the exception before them.

PyTorch's message about an operator without a kernel ends with a list of all its kernels, so that the last lines alone
would not say what failed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

_LINES = 12
_MAX_CHARACTERS = 400
_EXCEPTION = re.compile(r"^\s*([\w.]+\.)?\w*(Error|Exception|Interrupt)\b: ")


class LogTail:
    """Last lines of a log, and the last one that names an exception."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        """Start with ``lines``."""
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._exception, self._place, self._count = "", 0, 0
        for line in lines:
            self.append(line)

    def append(self, line: str) -> None:
        """Add a line."""
        self._count += 1
        self._lines.append(line)
        if _EXCEPTION.match(line):
            self._exception, self._place = line, self._count

    def clear(self) -> None:
        """Forget all lines."""
        self._lines.clear()
        self._exception, self._place, self._count = "", 0, 0

    def text(self) -> str:
        """Return the end of the log, indented; the exception comes first if it lies further back."""
        lines = list(self._lines)
        if self._exception and self._place <= self._count - len(lines):
            lines = [self._exception[:_MAX_CHARACTERS], "…", *lines]
        return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
