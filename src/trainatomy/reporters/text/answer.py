"""The difference of two records in one sentence."""

from __future__ import annotations

import json

from trainatomy.results.difference import Difference, MemoryChange, SetupChange, SpeedChange
from trainatomy.units import difference as signed
from trainatomy.units import human_bytes

_NAMED = 4
_SMALL = 0.05
_SAME_PACE = 0.01
_MANY = 2
"""From here on a ratio is easier to grasp than its excess over one."""
_OTHER = {"gpu": "another GPU", "driver": "another driver", "versions": "other versions"}


def answer(difference: Difference) -> str:
    """``B holds 2.31 GiB less: activations -2.50 GiB, temporary +205 MiB; a step takes 12 % longer; because
    train.gradient_checkpointing: false → true.``"""
    parts = [_memory(difference) + _where(difference), *_pace(difference), _why(difference)]
    return f"{'; '.join(part for part in parts if part)}."


def shown(value: object) -> str:
    """A setting as a workload file has it; what is not there as a dash."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def changes_phrase(change: SetupChange) -> str:
    """What a change is of."""
    titles = {"gpu": "GPU", "driver": "driver"}
    return titles.get(change.about, change.name)


def _memory(difference: Difference) -> str:
    """By device memory as measured, else by what the allocator reserved; what a failed run held says little."""
    for letter, side in (("A", difference.before), ("B", difference.after)):
        if side.status == "out of memory":
            both = difference.before.status == difference.after.status
            return "Both ran out of memory" if both else f"{letter} ran out of memory"
    figures = {shift.name: shift for shift in difference.figures}
    device, reserved = figures["device_bytes"], figures["peak_reserved_bytes"]
    figure, verb = (device, "holds") if device.change is not None else (reserved, "reserves")
    if not figure.change:
        return f"B {verb} as much as A"
    return f"B {verb} {human_bytes(abs(figure.change))} {'less' if figure.change < 0 else 'more'}"


def _where(difference: Difference) -> str:
    """The components that the most went to, largest first."""
    moved = sorted((each for each in difference.components if each.change), key=_size, reverse=True)
    named = [each for each in moved if _size(each) >= _SMALL * _size(moved[0])][:_NAMED]
    if not named:
        return ""
    listed = ", ".join(f"{each.component.replace('_', ' ')} {signed(each.change or 0)}" for each in named)
    return f": {'' if difference.source == 'measured' else 'as predicted, '}{listed}"


def _size(shift: MemoryChange) -> int:
    return abs(shift.change or 0)


def _pace(difference: Difference) -> list[str]:
    """By throughput where it is known, which stays comparable when a step holds another number of samples."""
    paces = {pace.name: pace for pace in difference.paces}
    if (ratio := _ratio(paces.get("samples_per_second"))) is not None:
        what = "samples per second"
        same, more, less = "as many samples per second", "more samples per second", "fewer samples per second"
    elif (ratio := _ratio(paces.get("step_seconds"))) is not None:
        what = "time a step"
        same, more, less = "steps as long", "longer a step", "shorter a step"
    else:
        return []
    if abs(ratio - 1) < _SAME_PACE:
        return [same]
    if ratio >= _MANY:
        return [f"{ratio:.1f} times the {what}"]
    return [f"{100 * abs(ratio - 1):.0f} % {more if ratio > 1 else less}"]


def _ratio(pace: SpeedChange | None) -> float | None:
    return pace.ratio if pace else None


def _why(difference: Difference) -> str:
    """What was asked for otherwise; else what it ran on or with.  One change is a reason; of several, who knows."""
    asked = [change for change in difference.changes if change.about == "workload"]
    beside = [change for change in difference.changes if change.about != "workload"]
    changes = asked or beside
    if not changes:
        return "nothing that the records say differs: so much do equal runs vary"
    listed = ", ".join(
        f"{changes_phrase(each)}: {shown(each.before)} → {shown(each.after)}" for each in changes[:_NAMED]
    )
    more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    others = ", ".join(dict.fromkeys(_OTHER[change.about] for change in beside)) if asked else ""
    other = f", with {others}" if others else ""
    return f"{'because' if len(difference.changes) == 1 else 'changed'} {listed}{more}{other}"
