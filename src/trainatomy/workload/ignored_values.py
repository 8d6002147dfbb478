"""Values of arguments that change neither memory nor time, and that transformers refuses nevertheless.

A training with a schedule that does not exist does not start, so its prediction would be of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from trainatomy.workload.arguments import arguments
from trainatomy.workload.nearest import suggestion
from trainatomy.workload.section import Problem

_NUMBERS = ("warmup_steps", "warmup_ratio")
CHECKED = frozenset((*arguments().ignored_values, "lr_scheduler_type", "lr_scheduler_kwargs", *_NUMBERS))
"""Ignored arguments whose values are checked."""


def ignored_problems(raw: Mapping[str, Any]) -> list[Problem]:
    """Return what transformers refuses among the ignored arguments of a ``train`` section."""
    return [*_unknown_values(raw), *_schedule_problems(raw), *_number_problems(raw)]


def _unknown_values(raw: Mapping[str, Any]) -> Iterator[Problem]:
    for name, known in arguments().ignored_values.items():
        given = raw.get(name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if value is not None and not isinstance(value, int) and _text(value) not in known:
                yield Problem((name,), f"has no value {_text(value)!r}{_hint(_text(value), known)}")


def _schedule_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    known = arguments().schedules
    schedule = _text(raw.get("lr_scheduler_type") or "linear")
    if schedule not in known:
        yield Problem(("lr_scheduler_type",), f"there is no schedule {schedule!r}{_hint(schedule, known)}")
        return
    if schedule == "reduce_lr_on_plateau" and _text(raw.get("eval_strategy") or "no") == "no":
        yield Problem(("lr_scheduler_type",), "reduce_lr_on_plateau needs an eval_strategy: steps or epoch")
    given, allowed = _mapping(raw.get("lr_scheduler_kwargs")), known[schedule]
    if allowed is None:
        return
    takes = f"{schedule} takes {', '.join(allowed) or 'no arguments'}"
    for key in given:
        if key not in allowed:
            yield Problem(("lr_scheduler_kwargs",), f"there is no argument {key!r}: {takes}")


def _number_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    for name in _NUMBERS:
        value = raw.get(name)
        try:
            number = 0 if value is None else float(value)
        except (TypeError, ValueError):
            yield Problem((name,), f"must be a number, found {value!r}")
        else:
            if number < 0:
                yield Problem((name,), f"must be at least 0, found {value}")


def _hint(value: str, known: Any) -> str:
    return suggestion(value, known) or f"; known: {', '.join(known)}"


def _text(value: Any) -> str:
    """Return a name as transformers reads it: members of enumerations by their value; YAML reads ``no`` as false."""
    return "no" if value is False else str(getattr(value, "value", value))


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return ``lr_scheduler_kwargs``, which may be text in the form of JSON."""
    read = yaml.safe_load(value) if isinstance(value, str) else value
    return read if isinstance(read, Mapping) else {}
