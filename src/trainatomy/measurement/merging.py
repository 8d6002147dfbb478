"""One measurement from two runs of the same training: times and totals of the one, the bill of the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainatomy.measurement.traces.settled import counted, reconciled
from trainatomy.units import exact_bytes

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement

_COMPARED = (
    ("allocated", "peak_allocated_bytes"),
    ("reserved", "peak_reserved_bytes"),
    ("on the device", "device_bytes"),
)


def merged(control: Measurement, recorded: Measurement) -> Measurement:
    """The control run with what only the recorded one knows; the totals are the control run's."""
    notes = [note for note in (*control.notes, *recorded.notes) if note]
    memory, modules, point = recorded.memory, recorded.modules, recorded.out_of_memory or control.out_of_memory
    if control.status != recorded.status:
        notes.append(f"the control run {_ended(control)}, the recorded run {_ended(recorded)}: it is at the edge")
        memory, modules, point = None, (), control.out_of_memory
    elif control.status == "completed" and memory is not None:
        notes += _differences(control, recorded)
        memory = reconciled(memory, counted(control))[0]
    return replace(
        control,
        memory=memory,
        modules=modules,
        out_of_memory=point,
        recorded_step_seconds=recorded.step_seconds,
        tape_file=recorded.tape_file,
        notes=tuple(dict.fromkeys(notes)),
        neighbours=tuple({one.pid: one for one in (*recorded.neighbours, *control.neighbours)}.values()),
    )


def _ended(measurement: Measurement) -> str:
    return "completed" if measurement.status == "completed" else "ran out of memory"


def _differences(control: Measurement, recorded: Measurement) -> list[str]:
    """A note for each total in which the runs differ; the bill follows the control run."""
    found = []
    for title, name in _COMPARED:
        one, other = getattr(control, name), getattr(recorded, name)
        if one is not None and other is not None and one != other:
            found.append(
                f"the most {title} was {exact_bytes(one)} bytes in the control run and {exact_bytes(other)} in the "
                "recorded one; the bill has the control run's total"
            )
    return found
