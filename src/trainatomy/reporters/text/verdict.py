"""The answer in one line, first on every page."""

from __future__ import annotations

from rich.text import Text

from trainatomy.results.memory import Instant, OutOfMemoryPoint, Verdict
from trainatomy.results.prediction import Prediction
from trainatomy.units import human_bytes, times

STYLES: dict[Verdict, str] = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}


def verdict_line(prediction: Prediction) -> Text:
    """``fits on H200 SXM (139.8 GiB): needs 9.12 GiB, 130.7 GiB to spare``; for what does not fit, what is short."""
    line = Text()
    line.append(prediction.verdict, style=STYLES[prediction.verdict])
    gpu, needed = prediction.gpu, prediction.memory.device_bytes
    line.append(f" on {gpu.name} ({human_bytes(gpu.memory_bytes)}): needs {human_bytes(needed)}, {_room(prediction)}")
    return line


def verdict_cell(prediction: Prediction) -> Text:
    """The verdict alone, in a table."""
    return Text(prediction.verdict, style=STYLES[prediction.verdict])


def _room(prediction: Prediction) -> str:
    room, retries = prediction.room_bytes, prediction.memory.num_alloc_retries
    if room < 0:
        return f"{human_bytes(-room)} short"
    if not prediction.fits:
        return f"and runs out in fragments although {human_bytes(room)} would be left"
    spare = f"{human_bytes(room)} to spare"
    if not retries:
        return spare
    given = f"{spare}, after the allocator gave its cache back {times(retries)}"
    if count := prediction.without_workspace:
        calls = "a convolution" if count == 1 else f"{count} convolutions"
        return f"{given}, and with {calls} by slower algorithms, for lack of memory"
    return given


def out_of_memory_line(point: OutOfMemoryPoint) -> Text:
    """Where a training that does not fit would stop."""
    return Text(
        f"It would stop {instant_phrase(point.instant)}: {human_bytes(point.requested_bytes)} wanted, "
        f"with {human_bytes(point.allocated_bytes)} allocated and {human_bytes(point.reserved_bytes)} reserved."
    )


def instant_phrase(instant: Instant) -> str:
    """``in step 2, backward, in encoder.layer.3 (aten::mm)``; steps are counted from 1 for a reader."""
    where = f", in {instant.module}" if instant.module else ""
    operation = f" ({instant.operation})" if instant.operation else ""
    if instant.phase == "load":
        when = "the loading of the model"
    elif instant.step < 0:
        when = "the set-up before the first step"
    else:
        when = f"step {instant.step + 1}, {instant.phase}"
    return f"in {when}{where}{operation}"
