"""Select records by conditions, including conditions on the settings of their workloads.

Resolve a reference to a record: an id, a prefix of one, a prefix of its hash, ``last``, or a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import yaml

from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.option import option
from trainatomy.results.record import Record, Summary
from trainatomy.workload.document import nearest, suggestion
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import leaves

_condition = partial(option, panel="Filters")


@dataclass(frozen=True, slots=True)
class Query:
    """Conditions that a record must meet, all of them; the defaults match every record.

    Attributes:
        gpu: Part of the GPU's name, in any case.
        name: Part of the run's name, in any case.
        status: Prefix of the status.
        since: Date or time, in UTC unless it names a zone.
        group: Name of the group.
        last: Number of newest records.
        where: Settings of the workload, ``("train.bf16=true", "model.id=gpt2")``, stated or left at their default.
    """

    gpu: str = _condition("", "The GPU's name contains this.")
    name: str = _condition("", "The training's name contains this.")
    status: str = _condition("", '"completed" or "out of memory" (prefix match).', metavar="STATUS")
    since: str = _condition("", "Measured at this time or later: 2026-11-21 or 2026-11-21T14:30, UTC.", metavar="DATE")
    group: str | None = _condition(None, "Runs of one comparison.")
    last: int | None = _condition(None, "The newest N runs.", metavar="N")
    where: tuple[str, ...] = _condition(
        (), "A setting of the workload, such as train.bf16=true, stated or by default; repeatable.", metavar="KEY=VALUE"
    )

    def __post_init__(self) -> None:
        """Raise ``TrainatomyError`` for an invalid condition."""
        _parse_time(self.since)
        for condition in self.where:
            _check_condition(condition)
        if self.last is not None and self.last < 1:
            raise TrainatomyError(f"last must be 1 or more, not {self.last}")

    def matches(self, record: Record) -> bool:
        """Return whether the record meets every condition but ``last``."""
        measured = record.measurement
        return (
            self.gpu.casefold() in measured.gpu.casefold()
            and self.name.casefold() in measured.name.casefold()
            and measured.status.startswith(self.status)
            and (self.group is None or self.group == record.group)
            and (not self.since or _parse_time(record.created) >= _parse_time(self.since))
            and (not self.where or self._has_settings(measured.workload))
        )

    def newest(self, rows: list[Summary]) -> tuple[Summary, ...]:
        """Return the ``last`` rows of ``rows``, which are ordered by time."""
        return tuple(rows if self.last is None else rows[-self.last :])

    def _has_settings(self, workload: dict[str, object]) -> bool:
        has = all_settings(workload) or stated_settings(workload)
        return all(_equals(has.get(key), text) for key, text in map(_split_condition, self.where))


def _split_condition(condition: str) -> tuple[str, str]:
    key, _, text = condition.partition("=")
    return key.strip(), text.strip()


def _check_condition(condition: str) -> None:
    """Raise ``TrainatomyError`` for a condition that no record could meet."""
    key, _ = _split_condition(condition)
    if "=" not in condition or not key:
        raise TrainatomyError(f"{condition!r} is not a condition: write KEY=VALUE, such as train.bf16=true")
    known = [".".join(map(str, path)) for path, _ in leaves(Workload)]
    if key not in known and not any(key.startswith(f"{each}.") for each in known):
        raise TrainatomyError(f"{key!r} is not a setting of a workload{suggestion(key, known)}")


def _equals(value: object, text: str) -> bool:
    """Return whether a setting has the value that was typed: as YAML reads it, as a number, or literally.

    An unset setting equals ``null``.
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


def _parse_time(text: str) -> datetime:
    """Return the time with its zone (default: UTC); raise ``TrainatomyError`` if ``text`` is not a time."""
    try:
        time = datetime.fromisoformat(text) if text else datetime.min
    except ValueError:
        raise TrainatomyError(f"{text!r} is not a date: write 2026-11-21 or 2026-11-21T14:30") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def all_settings(workload: Mapping[str, object]) -> dict[str, object] | None:
    """Return every setting of a workload by dotted key: ``{"model.id": "gpt2", "train.bf16": False, ...}``.

    Includes the defaults, but no setting that is unset.  Returns ``None`` for a workload that this version cannot read.
    """
    try:
        whole = Workload.from_mapping(workload).model_dump(mode="json", by_alias=True)
    except WorkloadError:
        return None
    return stated_settings(whole)


def stated_settings(workload: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that ``workload`` states, by dotted key; ``None`` counts as absent."""
    return {key: value for key, value in _flatten(workload, "") if value is not None}


def _flatten(mapping: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


EVERYTHING = Query()


ENDING = ".json"
_LAST = re.compile(r"last(?:~(\d+))?")
_SHOWN = 8


def split_path(text: str) -> tuple[str, str] | None:
    """Return folder and file name if ``text`` is the path or URL of a file rather than an id."""
    if "/" not in text and not text.endswith(ENDING):
        return None
    folder, slash, name = text.rpartition("/")
    return (folder or slash or ".", name if name.endswith(ENDING) else name + ENDING)


def resolve(text: str, ids: Sequence[str], folder: str) -> str:
    """Return the one of ``ids`` (oldest first) that ``text`` refers to.

    Raises:
        TrainatomyError: None or several match.
    """
    if text in ids:
        return text
    if not ids:
        raise TrainatomyError(f"There is no record {text!r}: {folder} holds none. `trainatomy measure` writes them.")
    if match := _LAST.fullmatch(text):
        return _from_the_end(int(match[1] or 0), ids, folder)
    matches = [each for each in ids if text and (each.startswith(text) or each.rpartition("-")[2].startswith(text))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        older = f" and {len(matches) - _SHOWN} older" if len(matches) > _SHOWN else ""
        shown = ", ".join(matches[-_SHOWN:]) + older
        raise TrainatomyError(f"{text!r} matches {len(matches)} records of {folder}: {shown}. Write more of the id.")
    raise TrainatomyError(
        f"There is no record {text!r} in {folder}{_suggestions(text, ids)}. `trainatomy history` lists them."
    )


def _from_the_end(back: int, ids: Sequence[str], folder: str) -> str:
    if back >= len(ids):
        raise TrainatomyError(f"There is no last~{back}: {folder} has {len(ids)} records.")
    return ids[-1 - back]


def _suggestions(text: str, ids: Sequence[str]) -> str:
    """Return the end of a message with ids of similar spelling, or whose hash is."""
    by_hash = {each.rpartition("-")[2]: each for each in ids}
    close = dict.fromkeys([*nearest(text, ids), *(by_hash[each] for each in nearest(text, by_hash))])
    return f"; the nearest: {', '.join(close)}" if close else ""
