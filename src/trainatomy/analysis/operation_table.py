"""Tabulate the operations of a step: FLOP, bytes and time by group and phase, module and operator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainatomy.analysis.memory import fold_layers
from trainatomy.catalog.links import bus_bytes
from trainatomy.operators.counts import Counts, count
from trainatomy.operators.operator import COMMUNICATION, GROUPS
from trainatomy.results.operations import (
    CollectiveShare,
    GroupShare,
    HeavyOperation,
    ModuleOperations,
    Operation,
    Operations,
    Unformulated,
)

STEP = "step"
_ALL = (*GROUPS, COMMUNICATION)
PHASES = ("forward", "recompute", "backward", "optimizer", "zero_grad", "other")


class PredictedTime(NamedTuple):
    """GPU seconds of one run of an operation (not of its repeats), and what bounds them (``''``: unknown)."""

    seconds: float
    bound_by: str = ""


@dataclass(slots=True)
class _Total:
    """A total over operations; ``formula``: all of them have a FLOP formula."""

    calls: int = 0
    flop: int = 0
    bytes: int = 0
    formula: bool = True
    seconds: float = 0.0
    measured: float = 0.0
    bounds: Counter[str] = field(default_factory=Counter)

    def add(self, work: Counts, repeats: int, timed: PredictedTime | None, measured: float | None) -> None:
        self.calls += repeats
        self.flop += (work.flop or 0) * repeats
        self.bytes += work.bytes * repeats
        self.formula = self.formula and work.flop is not None
        self.measured += (measured or 0.0) * repeats
        if timed is not None:
            self.seconds += timed.seconds * repeats
            self.bounds[timed.bound_by] += timed.seconds * repeats  # type: ignore[assignment]

    @property
    def bound_by(self) -> str | None:
        """The resource that bounds most of the time."""
        return (self.bounds.most_common(1)[0][0] or None) if self.bounds else None


class OperationTable:
    """The operations of one step with the work that each does, and totals over them.

    Args:
        operations: The operations of the step.
        times: Predicted time of each, in order.
        measured: Measured GPU seconds of each, in order.
        keep: Whether to include each; all of them by default.
    """

    def __init__(
        self,
        operations: Operations,
        times: Sequence[PredictedTime | None] | None = None,
        measured: Sequence[float | None] | None = None,
        keep: Iterable[bool] | None = None,
    ) -> None:
        self.works = [count(call) for call in operations.calls]
        self.operations = operations
        self.times, self.measured = times, measured
        kept = list(keep) if keep is not None else [True] * len(operations.operations)
        self.rows = [
            (index, operation, self.works[operation.call])
            for index, operation in enumerate(operations.operations)
            if kept[index]
        ]

    def kernels(self) -> Iterable[tuple[int, Operation, Counts]]:
        """Return index, operation and work of the operations that run a kernel of a group."""
        return (row for row in self.rows if row[2].group is not None)

    def aside(self) -> dict[str, int]:
        """Count the operations that run no such kernel, by kind."""
        names = {"view": "views", "host": "host", "read": "reads_by_host", "transfer": "transfers"}
        found = dict.fromkeys(names.values(), 0)
        for _, operation, work in self.rows:
            if work.kind in names:
                found[names[work.kind]] += operation.repeats
        return found

    def groups(self, peak: dict[str, int] | None = None) -> tuple[GroupShare, ...]:
        """Return the share of each group in the step and each of its phases; ``peak``: bytes by group at the peak."""
        sums: dict[tuple[str, str], _Total] = defaultdict(_Total)
        for index, operation, work in self.kernels():
            for phase in (STEP, operation.phase):
                sums[phase, work.group or ""].add(work, operation.repeats, self._timed(index), self._measured(index))
        found = []
        for phase in (STEP, *PHASES):
            whole = _sum_totals([sums[phase, group] for group in _ALL if (phase, group) in sums])
            if not whole.calls:
                continue
            for group in _ALL:
                if (phase, group) not in sums and (phase != STEP or group == COMMUNICATION):
                    continue
                held = (peak or {}).get(group, 0) if phase == STEP and peak is not None else None
                found.append(self._share(group, phase, sums.get((phase, group), _Total()), whole, held))
        return tuple(found)

    def _share(self, group: str, phase: str, part: _Total, whole: _Total, held: int | None) -> GroupShare:
        timed, measured = self.times is not None, self.measured is not None
        return GroupShare(
            group,
            phase,
            part.calls,
            part.flop,
            part.bytes,
            part.flop / part.bytes if part.bytes else None,
            _ratio(part.flop, whole.flop),
            _ratio(part.bytes, whole.bytes),
            held,
            part.seconds if timed else None,
            _ratio(part.seconds, whole.seconds) if timed else None,
            part.bound_by,
            part.measured if measured else None,
            _ratio(part.measured, whole.measured) if measured else None,
        )

    def total(self) -> _Total:
        """Return the total over all kernels."""
        whole = _Total()
        for index, operation, work in self.kernels():
            whole.add(work, operation.repeats, self._timed(index), self._measured(index))
        return whole

    def heaviest(self, top: int) -> tuple[HeavyOperation, ...]:
        """Return the ``top`` heaviest combinations of operator, module and phase.

        They are ordered by measured or else predicted time; without either by the larger of their shares of FLOP and
        of bytes.
        """
        sums: dict[tuple[str, str, str, str], _Total] = defaultdict(_Total)
        for index, operation, work in self.kernels():
            name = self.operations.calls[operation.call].name
            key = (name, fold_layers(operation.module, root=True), operation.phase, work.group or "")
            sums[key].add(work, operation.repeats, self._timed(index), self._measured(index))
        whole = self.total()
        found = [self._heavy(key, part, whole) for key, part in sums.items()]
        return tuple(sorted(found, key=_weight, reverse=True)[:top])

    def _heavy(self, key: tuple[str, str, str, str], part: _Total, whole: _Total) -> HeavyOperation:
        timed = self.times is not None
        return HeavyOperation(
            *key,
            part.calls,
            part.flop if part.formula else None,
            part.bytes,
            _ratio(part.flop, whole.flop),
            _ratio(part.bytes, whole.bytes),
            part.seconds if timed else None,
            _ratio(part.seconds, whole.seconds) if timed else None,
            part.bound_by,
            part.measured if self.measured is not None else None,
        )

    def modules(self, top: int) -> tuple[ModuleOperations, ...]:
        """Return the ``top`` heaviest modules, ordered as in ``heaviest``."""
        sums: dict[str, _Total] = defaultdict(_Total)
        for index, operation, work in self.kernels():
            part = sums[fold_layers(operation.module, root=True)]
            part.add(work, operation.repeats, self._timed(index), self._measured(index))
        whole = self.total()
        timed, measured = self.times is not None, self.measured is not None
        found = [
            ModuleOperations(
                module,
                part.calls,
                part.flop,
                part.bytes,
                _ratio(part.flop, whole.flop),
                _ratio(part.bytes, whole.bytes),
                part.seconds if timed else None,
                _ratio(part.seconds, whole.seconds) if timed else None,
                part.measured if measured else None,
                _ratio(part.measured, whole.measured) if measured else None,
            )
            for module, part in sums.items()
        ]
        return tuple(sorted(found, key=_weight, reverse=True)[:top])

    def collectives(self) -> tuple[CollectiveShare, ...]:
        """Return what moves data between GPUs by kind and size of the group, the largest messages in total first."""
        calls: Counter[tuple[str, int]] = Counter()
        sent: Counter[tuple[str, int]] = Counter()
        seconds: dict[tuple[str, int], float] = defaultdict(float)
        for index, operation, work in self.kernels():
            if work.group != COMMUNICATION:
                continue
            call = self.operations.calls[operation.call]
            numbers = dict(call.numbers)
            key = call.name.rpartition("::")[2], int(numbers.get("ranks", 2))
            timed = self._timed(index)
            calls[key] += operation.repeats
            sent[key] += int(numbers["bytes"]) * operation.repeats
            seconds[key] += (timed.seconds if timed is not None else 0.0) * operation.repeats
        found = [
            CollectiveShare(
                kind,
                ranks,
                calls[kind, ranks],
                size,
                seconds[kind, ranks] if self.times is not None else None,
                bus_bytes(kind, size, ranks) / seconds[kind, ranks] if seconds[kind, ranks] else None,
            )
            for (kind, ranks), size in sent.items()
        ]
        return tuple(sorted(found, key=lambda one: -one.bytes))

    def unformulated(self) -> tuple[Unformulated, ...]:
        """Return the operators without a FLOP formula, those that move the most bytes first."""
        sums: dict[str, _Total] = defaultdict(_Total)
        reasons: dict[str, str] = {}
        for _, operation, work in self.kernels():
            if work.flop is None and work.operator is not None:
                name = self.operations.calls[operation.call].name
                sums[name].add(work, operation.repeats, None, None)
                reasons[name] = work.operator.why
        whole = self.total().bytes
        found = [
            Unformulated(name, part.calls, part.bytes, _ratio(part.bytes, whole), reasons[name])
            for name, part in sums.items()
        ]
        return tuple(sorted(found, key=lambda row: -row.bytes))

    def by_rule(self) -> tuple[str, ...]:
        """Return the operators that no table names, whose group was derived from their form."""
        return tuple(
            sorted(
                {
                    self.operations.calls[operation.call].name
                    for _, operation, work in self.kernels()
                    if work.operator is not None and work.operator.inferred
                }
            )
        )

    def _timed(self, index: int) -> PredictedTime | None:
        return self.times[index] if self.times is not None else None

    def _measured(self, index: int) -> float | None:
        return self.measured[index] if self.measured is not None else None


def _sum_totals(parts: Iterable[_Total]) -> _Total:
    whole = _Total()
    for part in parts:
        whole.calls += part.calls
        whole.flop += part.flop
        whole.bytes += part.bytes
        whole.seconds += part.seconds
        whole.measured += part.measured
    return whole


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _weight(row: HeavyOperation | ModuleOperations) -> float:
    if row.measured_seconds is not None:
        return row.measured_seconds
    return row.seconds if row.seconds is not None else max(row.flop_share, row.bytes_share)
