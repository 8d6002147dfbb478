"""What ships as data: cards and architectures, with their sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def cards_table(cards: Sequence[Any]) -> Table:
    raise NotImplementedError


def architectures_table(architectures: Sequence[Any]) -> Table:
    raise NotImplementedError
