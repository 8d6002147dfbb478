"""Several training runs side by side: predicted, measured, and compared with published figures.

Training runs on several GPUs side by side: memory of the fullest GPU, throughput of all of them, and scaling.

An experiment on several GPUs whose times others published: predicted, measured and published side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from rich.text import Text

from trainatomy.reporters import run_sentences, sentences
from trainatomy.reporters.document import Column, Document, Part, Table, grid, section, table, words
from trainatomy.reporters.labels import SECTIONS, STATUS_STYLES, VERDICT_STYLES
from trainatomy.reporters.settings import plan_name, strategy_name
from trainatomy.reporters.text.gpus import gpus_for_page
from trainatomy.reporters.text.prediction import subject_of, verdict_cell
from trainatomy.results.comparison import Comparison, ComparisonRow, Spread
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Plan, Prediction, Scaling, fullest_rank, total_rate
from trainatomy.results.time import Time
from trainatomy.units import difference, human_bytes, many, mebibytes, percent, rate, seconds, signed_percent

EXPLANATION = (
    "Memory is that of the fullest GPU, samples/s those of all GPUs; scaling: throughput per GPU relative to the "
    "fastest of the same training runs on the fewest GPUs."
)
_NAME_WIDTH = 26


class _Placed(NamedTuple):
    """A row and its place."""

    place: int
    value: Any


class _Scaled(NamedTuple):
    """A predicted row, and its throughput on several GPUs."""

    row: ComparisonRow
    prediction: Prediction
    scaling: Scaling | None


class _Published(NamedTuple):
    """A figure of a row, as predicted and as published."""

    row: ComparisonRow
    predicted: float
    known: float
    is_first: bool = False


def _scaling_table(comparison: Comparison) -> Table:
    """Return one row for each predicted training, with its plan, memory, total throughput and scaling."""
    rows = [
        _Scaled(row, row.prediction, scaling)
        for row, scaling in zip(comparison.rows, comparison.scaling(), strict=True)
        if row.prediction
    ]
    named = any(row.name not in _named_by_plan(row.plan) for row, *_ in rows)
    return table(
        rows,
        words("\ntraining" if named else "\nplan", lambda each: each.row.name if named else plan_name(each.row.plan)),
        Column("\nGPUs", lambda each: _count(each.row.plan), is_shown=named),
        words("\nplan", lambda each: strategy_name(each.row.plan), wraps=False, is_shown=named),
        words("\nverdict", lambda each: verdict_cell(fullest_rank(each.prediction)), wraps=False),
        Column("device\nmemory", lambda each: human_bytes(fullest_rank(each.prediction).memory.device_bytes)),
        Column(
            "accum.\nsteps",
            lambda each: str(each.row.accumulation_steps),
            rank=3,
            is_shown=len({row.accumulation_steps for row, *_ in rows}) > 1,
        ),
        Column("time\nper step", lambda each: _step(each.prediction.time), rank=2),
        Column("samples/s\nin total", lambda each: _rates(each.scaling)[0]),
        Column("samples/s\nper GPU", lambda each: _rates(each.scaling)[1], rank=1),
        Column("\nscaling", lambda each: _rates(each.scaling)[2]),
        words(
            "\nGPU",
            lambda each: each.prediction.gpu.id,
            wraps=False,
            is_shown=len({each.prediction.gpu.id for each in rows}) > 1,
        ),
        name_width=22,
    )


def _step(time: Time | None) -> str:
    return "" if time is None else seconds(time.step_seconds)


def _named_by_plan(plan: Plan) -> tuple[str, ...]:
    """Return the names of rows that say nothing but the plan, as sweeps give them."""
    strategy = f"strategy={plan.strategy}"
    return (f"gpus={plan.gpus}", strategy, f"gpus={plan.gpus}, {strategy}", f"{strategy}, gpus={plan.gpus}")


def _count(plan: Plan) -> str:
    return str(plan.gpus) if plan.nodes == 1 else f"{plan.nodes} × {plan.gpus}"


def _rates(scaling: Scaling | None) -> list[str]:
    """Return the throughput in total, per GPU, and its efficiency."""
    if scaling is None:
        return ["", "", ""]
    efficiency = "" if scaling.efficiency is None else percent(scaling.efficiency, 1, 0)
    return [rate(scaling.samples_per_second), rate(scaling.samples_per_second_per_gpu), efficiency]


def _experiment_page(comparison: Comparison) -> Document:
    """Return the time of as many samples as the source took, for each training, and its ratio to the fastest."""
    samples = comparison.samples or 1
    gpus = ", ".join(dict.fromkeys(_machine(row) for row in comparison.rows if row.prediction))
    notes = dict.fromkeys(note for each in comparison.predictions for note in each.notes if "has not been" in note)
    lines = [
        "In brackets: times the fastest. Memory is that of the fullest GPU.",
        f"Published: {comparison.source}. {comparison.remark}".rstrip(),
        *notes,
    ]
    parts: list[Part] = [Text(), _experiment(comparison, samples), *_reversed(comparison), Text()]
    return Document((*parts, *(Text(line, style="dim") for line in lines)), f"{many(samples, 'sample')} on {gpus}")


def _reversed(comparison: Comparison) -> list[Text]:
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


def _experiment(comparison: Comparison, samples: int) -> Table:
    predicted = [_predicted(row, samples) for row in comparison.rows]
    measured = [_measured_in_experiment(row, samples) for row in comparison.rows]
    known = [row.published.seconds if row.published else None for row in comparison.rows]
    same = all(row.workload.get("era") for row in comparison.rows)  # else the source had another machine
    return table(
        map(_Placed, count(), comparison.rows),
        words("training", lambda each: each.value.name),
        Column("predicted", lambda each: _with_ratio(predicted, each.place)),
        Column("90 % interval", lambda each: _interval(each.value, predicted[each.place]), rank=2),
        Column("measured", lambda each: _with_ratio(measured, each.place), is_shown=any(measured)),
        Column("published", lambda each: _with_ratio(known, each.place)),
        Column("error", lambda each: _error(predicted[each.place], known[each.place]), is_shown=same),
        Column("memory", lambda each: _fullest(each.value.prediction), rank=1),
        name_width=23,
    )


def _fullest(prediction: Prediction | None) -> str:
    return human_bytes(fullest_rank(prediction).memory.device_bytes) if prediction else ""


def _predicted(row: ComparisonRow, samples: int) -> float | None:
    rate = total_rate(row.prediction) if row.prediction is not None else None
    return samples / rate if rate else None


def _measured_in_experiment(row: ComparisonRow, samples: int) -> float | None:
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


def comparison_page(comparison: Comparison) -> Document:
    """Return a page with one row for each training."""
    if comparison.measured:
        page = _measured_page(comparison)
    else:
        page = gpus_for_page(comparison) if comparison.is_across_gpus else _predicted_page(comparison)
    return replace(page, parts=(subject_of(comparison.predictions), *page.parts))


def run_line(name: str, measurement: Measurement | None, error: Exception | None, from_record: bool) -> str:
    """Return one finished run in a line: ``fp16: 9.12 GiB, 108 ms per step``."""
    if measurement is None:
        return f"{name}: failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    size = measurement.peak_reserved_bytes if measurement.device_bytes is None else measurement.device_bytes
    outcome = human_bytes(size) if measurement.status == "completed" else measurement.status
    step = "" if measurement.step_seconds is None else f", {seconds(measurement.step_seconds)} per step"
    return f"{name}: {outcome}{step}{' (from its record)' if from_record else ''}"


def _predicted_page(comparison: Comparison) -> Document:
    if comparison.on_several_gpus and comparison.source:
        return _experiment_page(comparison)
    gpus = {each.gpu.name: each.gpu.memory_bytes for each in comparison.predictions}
    where = "".join(f" on {name} ({human_bytes(memory)})" for name, memory in gpus.items()) if len(gpus) == 1 else ""
    return Document((Text(), *_predicted_parts(comparison, len(gpus) > 1)), f"{SECTIONS['peak']}{where}")


def _predicted_parts(comparison: Comparison, with_gpu: bool) -> Iterator[Part]:
    remark = _dim(comparison.remark) if comparison.remark else []
    if comparison.on_several_gpus:
        yield _scaling_table(comparison)
        yield from _dim(EXPLANATION)
        yield from _costs_from(comparison.predictions)
    elif not comparison.source:
        yield _predictions(comparison.predictions, with_gpu=with_gpu)
        yield from remark
        yield from _costs_from(comparison.predictions)
    else:
        yield _published_memory(comparison)
        yield from _dim(f"All sizes are in MiB, which the source calls MB. Published: {comparison.source}.")
        yield from remark
        yield from _published_times(comparison)


def _dim(text: str) -> list[Part]:
    return [Text(), Text(text, style="dim")]


def _costs_from(predictions: Sequence[Prediction]) -> list[Part]:
    """Return a line with the sources of the predicted times; nothing without times."""
    sources = dict.fromkeys(each.time.priced_by for each in predictions if each.time is not None)
    return _dim(f"Kernel times from: {'; '.join(sources)}.") if sources else []


def _predictions(predictions: Sequence[Prediction], *, with_gpu: bool) -> Table:
    with_time = any(prediction.time is not None for prediction in predictions)
    first = predictions[0].memory.device_bytes if predictions else 0
    return table(
        map(_Placed, count(), predictions),
        words("\ntraining", lambda each: each.value.name),
        words("\nverdict", lambda each: verdict_cell(each.value), wraps=False),
        Column("device\nmemory", lambda each: human_bytes(each.value.memory.device_bytes)),
        Column(
            "vs.\nfirst", lambda each: difference(each.value.memory.device_bytes - first) if each.place else "", rank=1
        ),
        Column("\nallocated", lambda each: human_bytes(each.value.memory.peak_allocated_bytes), rank=2),
        Column("\nreserved", lambda each: human_bytes(each.value.memory.peak_reserved_bytes), rank=3),
        Column("time\nper step", lambda each: _step(each.value.time), is_shown=with_time),
        Column("samples\nper s", lambda each: _throughput(each.value), is_shown=with_time),
        words("\nGPU", lambda each: each.value.gpu.id, wraps=False, is_shown=with_gpu),
        name_width=_NAME_WIDTH,
    )


def _throughput(prediction: Prediction) -> str:
    pace = total_rate(prediction) if prediction.fits else None
    return "" if pace is None else rate(pace)


def _published_memory(comparison: Comparison) -> Table:
    """Return the predicted and published sizes in MiB, the unit of the published ones."""
    first = mebibytes(comparison.predictions[0].memory.device_bytes) if comparison.predictions else 0
    rows = [
        _Published(
            row, mebibytes(row.prediction.memory.device_bytes), mebibytes(row.published.memory_bytes), place == 0
        )
        for place, row in enumerate(comparison.rows)
        if row.prediction is not None and row.published is not None and row.published.memory_bytes is not None
    ]
    return table(
        rows,
        words("\ntraining", lambda each: each.row.name),
        words("\nverdict", lambda each: verdict_cell(each.row.prediction), wraps=False),
        Column("\npredicted", lambda each: str(each.predicted)),
        Column("\npublished", lambda each: str(each.known)),
        Column("\nerror", lambda each: signed_percent(each.predicted - each.known, each.known)),
        Column("vs.\nfirst", lambda each: "" if each.is_first else f"{each.predicted - first:+d}", rank=1),
        name_width=_NAME_WIDTH,
    )


def _published_times(comparison: Comparison) -> list[Part]:
    """Return a section with the time of as many samples as the source took; nothing where it gives no times."""
    samples = comparison.samples
    rows = [
        _Published(row, samples / row.prediction.time.samples_per_second, row.published.seconds)
        for row in comparison.rows
        if samples and row.prediction and row.prediction.time and row.published and row.published.seconds
    ]
    if not rows:
        return []
    times = table(
        rows,
        words("training", lambda each: each.row.name),
        Column("predicted", lambda each: seconds(each.predicted)),
        Column("90 % interval", lambda each: _interval(each.row, each.predicted)),
        Column("published", lambda each: seconds(each.known)),
        Column("error", lambda each: _error(each.predicted, each.known)),
        name_width=_NAME_WIDTH,
    )
    return [section(f"Time for {samples} samples", times, *_costs_from(comparison.predictions))]


def _measured_page(comparison: Comparison) -> Document:
    return Document(tuple(_measured_parts(comparison)), f"Measured on {', '.join(comparison.gpus) or 'a GPU'}")


def _measured_parts(comparison: Comparison) -> Iterator[Part]:
    yield Text(_setup(comparison), style="dim")
    yield Text()
    yield _measured(comparison)
    if comparison.source and comparison.on_several_gpus:
        yield section(SECTIONS["published"], _experiment_page(comparison))
    elif comparison.source:
        source = f"Published: {comparison.source}. {comparison.remark}".rstrip()
        yield section(SECTIONS["published"], _measured_and_published(comparison), *_dim(source))
    rows = comparison.rows
    explained = {
        "out_of_memory": [(row.name, _out_of_memory(row)) for row in rows if row.ran_out],
        "failed": [(row.name, row.errors[0]) for row in rows if row.errors],
        "not_predicted": [(row.name, row.prediction_error) for row in rows if row.prediction is None],
        "host_pace": [(row.name, pace) for row in rows if (pace := run_sentences.compared_pace(row))],
        "power": [(row.name, lines) for row in rows if (lines := run_sentences.compared_slowdowns(row))],
    }
    for name, entries in explained.items():
        if entries:
            cells = [(Text(title, style="bold"), Text(text)) for title, text in entries]
            yield section(SECTIONS[name], grid(cells, words(ratio=1), words(ratio=2)))


def _setup(comparison: Comparison) -> str:
    memory = "as nvidia-smi shows it" if _figure(comparison) == "device_bytes" else "as reserved by PyTorch"
    repeats = f"; medians of {comparison.repeats} runs, with the range where they differ" * (comparison.repeats > 1)
    group = f"; records: {comparison.group}" if comparison.group else ""
    return f"Each run is a fresh process; memory {memory}{repeats}{group}."


def _figure(comparison: Comparison) -> str:
    """Return the figure to compare: device memory, unless the driver did not report it for a run."""
    known = all(each.device_bytes is not None for row in comparison.rows for each in row.completed)
    return "device_bytes" if known else "peak_reserved_bytes"


def _measured(comparison: Comparison) -> Table:
    figure, rows = _figure(comparison), comparison.rows
    samples = None if comparison.source else comparison.samples
    with_time = any(_predicted_time(row) for row in rows)
    return table(
        rows,
        words("\ntraining", lambda row: row.name),
        Column("predicted\nmemory", lambda row: _predicted_memory(row, figure)),
        Column("measured\nmemory", lambda row: _outcome(row, figure)),
        Column("\ngap", lambda row: _gap(row, figure)),
        Column("predicted\nstep", _predicted_time, rank=1, is_shown=with_time),
        Column("measured\nstep", lambda row: _spread(row.spread("step_seconds"), seconds)),
        Column("samples\nper s", lambda row: _spread(row.total_rate, rate), rank=2),
        Column(f"{samples}\nsamples", lambda row: _total_time(row, samples or 0), rank=3, is_shown=bool(samples)),
        name_width=20,
    )


def _measured_and_published(comparison: Comparison) -> Table:
    """Return memory and, where the source gives it, the time of as many samples."""
    figure, samples = _figure(comparison), comparison.samples

    def published(row: ComparisonRow, name: str, text: Callable[[float], str]) -> str:
        known = getattr(row.published, name)
        return "" if known is None else text(known)

    return table(
        [row for row in comparison.rows if row.published is not None],
        words("\ntraining", lambda row: row.name),
        Column("measured\nmemory", lambda row: _outcome(row, figure)),
        Column("published\nmemory", lambda row: published(row, "memory_bytes", _size)),
        Column(f"measured\n{samples} samples", lambda row: _total_time(row, samples or 0), is_shown=bool(samples)),
        Column(f"published\n{samples} samples", lambda row: published(row, "seconds", seconds), is_shown=bool(samples)),
        name_width=_NAME_WIDTH,
    )


def _predicted_memory(row: ComparisonRow, figure: str) -> Text:
    if row.prediction is None:
        return Text("-", style="dim")
    text = Text(human_bytes(getattr(row.prediction.memory, figure)))
    if row.prediction.out_of_memory is not None:
        text.append("\ndoes not fit", style=VERDICT_STYLES["does not fit"])
    return text


def _outcome(row: ComparisonRow, figure: str) -> Text:
    """Return the measured memory, the failure, or both where only some repeats completed."""
    if row.status == "completed":
        return _spread(row.spread(figure), _size)
    failure = Text(row.status.replace("out of ", "out of\n"), style=STATUS_STYLES[row.status])
    return Text.assemble(_spread(row.spread(figure), _size), "\n", failure) if row.completed else failure


def _gap(row: ComparisonRow, figure: str) -> str:
    gap = row.gap(figure)
    return "" if gap is None else signed_percent(gap, 1)


def _predicted_time(row: ComparisonRow) -> str:
    return _step(row.prediction.time) if row.prediction is not None else ""


def _total_time(row: ComparisonRow, samples: int) -> str:
    spread = row.total_rate
    return "" if spread is None or not spread.median else seconds(samples / spread.median)


def _spread(spread: Spread | None, text: Callable[[float], str]) -> Text:
    """Return the median, with the range below it where the repeats differ visibly."""
    if spread is None:
        return Text()
    drawn, low, high = Text(text(spread.median)), text(spread.least), text(spread.most)
    if low != high:
        number, _, unit = low.rpartition(" ")
        short = number if unit and high.endswith(f" {unit}") else low
        drawn.append(f"\n{short}–{high}", style="dim")
    return drawn


def _size(count: float) -> str:
    return human_bytes(round(count))


def _out_of_memory(row: ComparisonRow) -> str:
    """Return the allocation that failed; the message where that is not known."""
    if (point := row.out_of_memory) is not None:
        return f"{sentences.instant(point.instant)}: {sentences.failed_allocation(point)}"
    return row.ran_out.message if row.ran_out else ""
