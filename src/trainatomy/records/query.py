"""Which records are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import yaml

from trainatomy.errors import TrainatomyError
from trainatomy.records.settings import settings, stated
from trainatomy.workload.nearest import suggestion

if TYPE_CHECKING:
    from trainatomy.results.record import Record, Summary


@dataclass(frozen=True, slots=True)
class Query:
    """Conditions that a record has to meet, all of them; an empty one asks for nothing.

    ``gpu``, ``name``: text that occurs in it, whatever the case; ``status``: the beginning of it; ``since``: a date or
    a time, UTC unless it says; ``group``: the whole name; ``last``: so many of the newest; ``where``: settings of the
    workload, ``("train.bf16=true", "model.id=gpt2")``, whether they were stated or left at their default.
    """

    gpu: str = ""
    name: str = ""
    status: str = ""
    since: str = ""
    group: str | None = None
    last: int | None = None
    where: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ``TrainatomyError`` for what cannot be asked."""
        _time(self.since)
        for condition in self.where:
            _check(condition)
        if self.last is not None and self.last < 1:
            raise TrainatomyError(f"the last {self.last} records are none: ask for 1 or more")

    def wants(self, record: Record) -> bool:
        """Whether the record meets every condition but ``last``."""
        measured = record.measurement
        return (
            self.gpu.casefold() in measured.gpu.casefold()
            and self.name.casefold() in measured.name.casefold()
            and measured.status.startswith(self.status)
            and (self.group is None or self.group == record.group)
            and (not self.since or _time(record.created) >= _time(self.since))
            and (not self.where or self._has_settings(measured.workload))
        )

    def newest(self, rows: list[Summary]) -> tuple[Summary, ...]:
        """The ``last`` ones of ``rows``, which are in order of time."""
        return tuple(rows if self.last is None else rows[-self.last :])

    def _has_settings(self, workload: dict[str, object]) -> bool:
        has = settings(workload) or stated(workload)
        return all(_is(has.get(key), text) for key, text in map(_parts, self.where))


def _parts(condition: str) -> tuple[str, str]:
    key, _, text = condition.partition("=")
    return key.strip(), text.strip()


def _check(condition: str) -> None:
    """Raises ``TrainatomyError`` for a condition that no record could meet."""
    from trainatomy.workload.schema import Workload
    from trainatomy.workload.section import leaves

    key, _ = _parts(condition)
    if "=" not in condition or not key:
        raise TrainatomyError(f"{condition!r} is no condition: write KEY=VALUE, such as train.bf16=true")
    known = [".".join(map(str, path)) for path, _ in leaves(Workload)]
    if key not in known and not any(key.startswith(f"{each}.") for each in known):
        raise TrainatomyError(f"{key!r} is no setting of a workload{suggestion(key, known)}")


def _is(value: object, text: str) -> bool:
    """Whether a setting has the value that was typed: as YAML reads it, as a number, or as it is spelt.

    An unset one is ``null``.
    """
    if str(value) == text:
        return True
    try:
        typed = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    if isinstance(value, bool) or isinstance(typed, bool) or value is None:
        return value is typed
    try:
        return bool(value == typed or float(str(value)) == float(text))
    except ValueError:
        return False


def _time(text: str) -> datetime:
    """A time with its zone; raises ``TrainatomyError`` for what is none."""
    try:
        time = datetime.fromisoformat(text) if text else datetime.min
    except ValueError:
        raise TrainatomyError(f"{text!r} is no date: write 2026-11-21 or 2026-11-21T14:30") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


EVERYTHING = Query()
