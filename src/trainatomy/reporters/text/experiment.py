"""An experiment on several GPUs whose times others published: predicted, measured and published side by side."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from trainatomy.reporters.text.rendering import AdaptiveTable, Column
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.plan import fullest_rank, total_rate
from trainatomy.units import human_bytes, many, signed_percent


def experiment_page(comparison: Comparison) -> Group:
    """Return the time of as many samples as the source took, for each training, and its ratio to the fastest."""
    samples = comparison.samples or 1
    gpus = ", ".join(dict.fromkeys(_machine(row) for row in comparison.rows if row.prediction))
    parts: list[RenderableType] = [
        Text(f"{many(samples, 'sample')} on {gpus}", style="bold"),
        Text(),
        _table(comparison, samples),
        *_reversed(comparison),
        Text(),
        Text("In brackets: times the fastest. Memory is that of the fullest GPU.", style="dim"),
        Text(f"Published: {comparison.source}. {comparison.remark}".rstrip(), style="dim"),
    ]
    notes = dict.fromkeys(note for each in comparison.predictions for note in each.notes if "has not been" in note)
    return Group(*parts, *(Text(note, style="dim") for note in notes))


def _reversed(comparison: Comparison) -> list[RenderableType]:
    """Return which trainings are predicted in another order than the published one, and what to know of them."""
    pairs = comparison.reversals()
    if not pairs:
        return []
    lines = [
        f"Predicted, {first.name} is faster than {second.name}; published, it was slower "
        f"({_published_time(first)} against {_published_time(second)})."
        for first, second in pairs
    ]
    notes = dict.fromkeys(row.published.note for pair in pairs for row in pair if row.published and row.published.note)
    return [Text(), *(Text(line, style="yellow") for line in lines), *map(Text, notes)]


def _published_time(row: ComparisonRow) -> str:
    assert row.published is not None and row.published.seconds is not None
    return f"{row.published.seconds:.1f} s"


def _machine(row: ComparisonRow) -> str:
    assert row.prediction is not None
    return f"{row.plan.world_size} × {row.prediction.gpu.name}"


def _table(comparison: Comparison, samples: int) -> AdaptiveTable:
    predicted = [_predicted(row, samples) for row in comparison.rows]
    measured = [_measured(row, samples) for row in comparison.rows]
    known = [row.published.seconds if row.published else None for row in comparison.rows]
    columns = [Column("predicted"), Column("90 % interval", 2)]
    columns += [Column("measured")] if any(measured) else []
    same = all(row.workload.get("era") for row in comparison.rows)  # else the source had another machine
    columns += [Column("published")] + [Column("error")] * same + [Column("memory", 1)]
    table = AdaptiveTable("training", columns, name_width=23)
    for place, row in enumerate(comparison.rows):
        cells: list[str | Text] = [_with_ratio(predicted, place), _interval(row, predicted[place])]
        cells += [_with_ratio(measured, place)] if any(measured) else []
        cells += [_with_ratio(known, place)] + [_error(predicted[place], known[place])] * same
        cells.append(human_bytes(fullest_rank(row.prediction).memory.device_bytes) if row.prediction else "")
        table.add_row(row.name, *cells)
    return table


def _predicted(row: ComparisonRow, samples: int) -> float | None:
    rate = total_rate(row.prediction) if row.prediction is not None else None
    return samples / rate if rate else None


def _measured(row: ComparisonRow, samples: int) -> float | None:
    spread = row.total_rate
    return samples / spread.median if spread and spread.median else None


def _with_ratio(times: list[float | None], place: int) -> str:
    """Return a time with its ratio to the shortest of its column: ``131.4 s (1.29)``."""
    own = times[place]
    if own is None:
        return ""
    return f"{own:.1f} s ({own / min(each for each in times if each is not None):.2f})"


def _interval(row: ComparisonRow, predicted: float | None) -> str:
    time = row.prediction.time if row.prediction is not None else None
    if time is None or predicted is None:
        return ""
    low, high = (predicted * end / time.step_seconds for end in time.interval_seconds)
    return f"{low:.0f} to {high:.0f} s"


def _error(predicted: float | None, known: float | None) -> str:
    return "" if predicted is None or known is None else signed_percent(predicted - known, known, 0)
