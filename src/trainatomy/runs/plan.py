"""What a campaign runs, in which order, and under which name its records are kept."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainatomy.workload.schema import Workload

HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """``workloads``, each to be run ``repeats`` times; records are kept under the name ``group``."""

    workloads: tuple[Workload, ...]
    group: str
    repeats: int = 1

    def __len__(self) -> int:
        return len(self.workloads) * self.repeats

    def runs(self) -> Iterator[tuple[int, int]]:
        """Row and repeat of each run: every row once, then every row again.

        So an interrupted campaign has whole tables, and a card that warms up does not favour the first rows.
        """
        for repeat in range(self.repeats):
            for row in range(len(self.workloads)):
                yield row, repeat


def group_name(title: str, workloads: Sequence[Workload], *, fresh: datetime | None = None) -> str:
    """``notebook-3fa9c1b7``: the title and a hash of what is compared, names and order included.

    The number of repeats is no part of it, so that more of them go on from what is there.  With ``fresh``, a time, the
    name is one that no campaign had before: ``notebook-3fa9c1b7-20261121T122005``.
    """
    content = json.dumps([workload.to_mapping() for workload in workloads], sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]
    name = f"{re.sub(r'[^A-Za-z0-9._]+', '-', title).strip('-.') or 'comparison'}-{digest}"
    return f"{name}-{fresh.astimezone(UTC):%Y%m%dT%H%M%S}" if fresh else name
