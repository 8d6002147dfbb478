"""Several trainings side by side: predicted, with the difference to the first and, where there is one, the published
figure; or predicted and measured, with the gap, time and throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.published import published_memory, published_times
from trainatomy.reporters.text.rendering import figures, section
from trainatomy.reporters.text.verdict import STYLES, instant_phrase, verdict_cell
from trainatomy.results.comparison import Comparison, ComparisonRow, Spread
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import OutOfMemoryPoint
from trainatomy.results.prediction import Prediction
from trainatomy.units import difference, human_bytes, rate, seconds, signed_percent

_OUTCOMES = {"out of memory": "bold red", "failed": "bold red", "not measured": "dim"}


def comparison_page(comparison: Comparison) -> Group:
    """One row a training."""
    if comparison.measured:
        return _measured_page(comparison)
    predictions = comparison.predictions
    cards = {prediction.gpu.name: prediction.gpu.memory_bytes for prediction in predictions}
    several = len(cards) > 1
    where = "" if several else "".join(f" on {name} ({human_bytes(memory)})" for name, memory in cards.items())
    table = published_memory(comparison) if comparison.source else _table(predictions, with_card=several)
    parts: list[RenderableType] = [Text(f"Memory at the peak{where}", style="bold"), Text(), table]
    if comparison.source:
        unit = "MiB throughout, as the source counts (its MB)."
        parts += [Text(), Text(f"{unit} Published: {comparison.source}.", style="dim")]
    if comparison.remark:
        parts += [Text(), Text(comparison.remark, style="dim")]
    if comparison.source:
        parts += published_times(comparison)
    elif priced := dict.fromkeys(each.time.priced_by for each in predictions if each.time is not None):
        parts += [Text(), Text(f"Time of a step, priced by: {'; '.join(priced)}.", style="dim")]
    return Group(*parts)


def run_line(name: str, measurement: Measurement | None, error: Exception | None, from_record: bool) -> str:
    """One run that ended, in a line: ``fp16: 9.12 GiB, 108 ms a step``."""
    if measurement is None:
        return f"{name}: failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    size = measurement.peak_reserved_bytes if measurement.device_bytes is None else measurement.device_bytes
    said = human_bytes(size) if measurement.status == "completed" else measurement.status
    step = "" if measurement.step_seconds is None else f", {seconds(measurement.step_seconds)} a step"
    return f"{name}: {said}{step}{' (on record)' if from_record else ''}"


def _table(predictions: Sequence[Prediction], *, with_card: bool) -> Table:
    with_time = any(prediction.time is not None for prediction in predictions)
    titles = ["device\nmemory", "to the\nfirst", "\nallocated", "\nreserved", *(["\nstep"] if with_time else [])]
    table = figures("training", "verdict", numbers=titles)
    if with_card:
        table.add_column("\ncard", no_wrap=True)
    first = predictions[0].memory.device_bytes
    for index, prediction in enumerate(predictions):
        memory = prediction.memory
        change = difference(memory.device_bytes - first) if index else ""
        sizes = (memory.peak_allocated_bytes, memory.peak_reserved_bytes)
        cells: list[RenderableType] = [
            prediction.name,
            verdict_cell(prediction),
            human_bytes(memory.device_bytes),
            change,
            *map(human_bytes, sizes),
        ]
        if with_time:
            cells.append("" if prediction.time is None else seconds(prediction.time.step_seconds))
        table.add_row(*cells, *([prediction.gpu.id] if with_card else []))
    return table


def _measured_page(comparison: Comparison) -> Group:
    parts: list[RenderableType] = [
        Text(f"Measured on {', '.join(comparison.gpus) or 'a GPU'}", style="bold"),
        Text(_setting(comparison), style="dim"),
        Text(),
        _measured_table(comparison),
    ]
    if comparison.source:
        told = Text(f"Published: {comparison.source}. {comparison.remark}", style="dim")
        parts.append(section("Beside what was published", _beside_published(comparison), Text(), told))
    parts += _explained("Out of memory", [(row.name, _ran_out(row)) for row in comparison.rows if row.ran_out])
    failed = [(row.name, row.errors[0]) for row in comparison.rows if row.errors]
    parts += _explained("Failed", failed)
    unpredicted = [(row.name, row.prediction_error) for row in comparison.rows if row.prediction is None]
    parts += _explained("Not predicted", unpredicted)
    return Group(*parts)


def _setting(comparison: Comparison) -> str:
    """What the figures are, in a sentence or two."""
    what = "memory as nvidia-smi shows it" if _figure(comparison) == "device_bytes" else "memory PyTorch reserved"
    repeats = f"; medians of {comparison.repeats} runs, least–largest where they differ" * (comparison.repeats > 1)
    group = f"; records: {comparison.group}" if comparison.group else ""
    return f"Each in a fresh process; {what}{repeats}{group}."


def _figure(comparison: Comparison) -> str:
    """The memory that is compared: the device's, unless the driver did not say it of a run."""
    known = all(each.device_bytes is not None for row in comparison.rows for each in row.completed)
    return "device_bytes" if known else "peak_reserved_bytes"


def _measured_table(comparison: Comparison) -> Table:
    figure, rows = _figure(comparison), comparison.rows
    samples = None if comparison.source else comparison.samples
    with_time = any(_predicted_step(row) is not None for row in rows)
    titles = ["predicted\nmemory", "measured\nmemory", "\ngap"]
    titles += [*(["predicted\nstep"] if with_time else []), "\nstep", "samples\nper s"]
    titles += [f"{samples}\nsamples"] if samples else []
    table = figures("training", numbers=titles)
    for row in rows:
        cells: list[RenderableType] = [_predicted(row, figure), _outcome(row, figure), _gap(row, figure)]
        cells += [_predicted_time(row)] if with_time else []
        cells += [_cell(row.spread("step_seconds"), seconds), _cell(row.spread("samples_per_second"), rate)]
        cells += [_total(row, samples)] if samples else []
        table.add_row(row.name, *cells)
    return table


def _predicted(row: ComparisonRow, figure: str) -> Text:
    if row.prediction is None:
        return Text("-", style="dim")
    text = Text(human_bytes(getattr(row.prediction.memory, figure)))
    if row.prediction.out_of_memory is not None:
        text.append("\ndoes not fit", style=STYLES["does not fit"])
    return text


def _outcome(row: ComparisonRow, figure: str) -> Text:
    """The measured memory; what happened instead; or both, where only some repeats came to their end."""
    if row.status == "completed":
        return _cell(row.spread(figure), _bytes)
    said = Text(row.status.replace("out of ", "out of\n"), style=_OUTCOMES[row.status])
    if row.completed:
        said = Text.assemble(_cell(row.spread(figure), _bytes), "\n", said)
    return said


def _gap(row: ComparisonRow, figure: str) -> str:
    gap = row.gap(figure)
    return "" if gap is None else signed_percent(gap, 1)


def _beside_published(comparison: Comparison) -> Table:
    """Memory and, where the source gives it, the time of as many samples."""
    figure, samples = _figure(comparison), comparison.samples
    titles = ["measured\nmemory", "published\nmemory"]
    titles += [f"measured\n{samples} samples", f"published\n{samples} samples"] if samples else []
    table = figures("training", numbers=titles)
    for row in comparison.rows:
        if row.published is None:
            continue
        cells: list[RenderableType] = [_outcome(row, figure), human_bytes(row.published.memory_bytes)]
        if samples:
            then = row.published.seconds
            cells += [_total(row, samples), "" if then is None else seconds(then)]
        table.add_row(row.name, *cells)
    return table


def _predicted_step(row: ComparisonRow) -> float | None:
    """Seconds of a step, where the prediction has a time."""
    time = row.prediction.time if row.prediction is not None else None
    return None if time is None else time.step_seconds


def _predicted_time(row: ComparisonRow) -> str:
    step = _predicted_step(row)
    return "" if step is None else seconds(step)


def _total(row: ComparisonRow, samples: int) -> str:
    """What the guide calls time: so many samples at the measured rate."""
    pace = row.spread("samples_per_second")
    return "" if pace is None or not pace.median else seconds(samples / pace.median)


def _cell(spread: Spread | None, say: Callable[[float], str]) -> Text:
    """The median and, where repeats differ as far as one can see, the least and the largest below it."""
    if spread is None:
        return Text("")
    text, least, most = Text(say(spread.median)), say(spread.least), say(spread.most)
    if least != most:
        number, _, unit = least.partition(" ")
        text.append(f"\n{number if most.endswith(f' {unit}') else least}–{most}", style="dim")
    return text


def _bytes(count: float) -> str:
    return human_bytes(round(count))


def _ran_out(row: ComparisonRow) -> str:
    """What was held and asked for when memory ran out; the message of PyTorch where that is all there is."""
    if (point := row.out_of_memory) is not None:
        return _held(point)
    return row.ran_out.message if row.ran_out else ""


def _held(point: OutOfMemoryPoint) -> str:
    held = f"{human_bytes(point.allocated_bytes)} allocated and {human_bytes(point.reserved_bytes)} reserved"
    return f"{human_bytes(point.requested_bytes)} asked for {instant_phrase(point.instant)}, with {held}"


def _explained(title: str, entries: Sequence[tuple[str, str]]) -> list[RenderableType]:
    """A section with a line for each row that needs explaining; nothing where none does."""
    if not entries:
        return []
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for name, text in entries:
        table.add_row(Text(name, style="bold"), Text(text))
    return [section(title, table)]
