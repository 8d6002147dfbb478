"""Several training runs side by side: predicted, measured, and compared with published figures.

Training runs on several GPUs side by side: memory of the fullest GPU, throughput of all of them, and scaling.

An experiment on several GPUs whose times others published: predicted, measured and published side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import run_sentences, sentences
from trainatomy.reporters.labels import SECTIONS, STATUS_STYLES, VERDICT_STYLES
from trainatomy.reporters.settings import plan_name, strategy_name
from trainatomy.reporters.text.gpus import gpus_for_page
from trainatomy.reporters.text.prediction import subject_lines, verdict_cell
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, section
from trainatomy.results.comparison import Comparison, ComparisonRow, Spread
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Plan, Prediction, Scaling, fullest_rank, total_rate
from trainatomy.units import difference, human_bytes, many, mebibytes, percent, rate, seconds, signed_percent

EXPLANATION = (
    "Memory is that of the fullest GPU, samples/s those of all GPUs; scaling: throughput per GPU relative to the "
    "fastest of the same training runs on the fewest GPUs."
)


def scaling_table(comparison: Comparison) -> AdaptiveTable:
    """Return one row for each predicted training, with its plan, memory, total throughput and scaling."""
    rows = [
        (row, scaling) for row, scaling in zip(comparison.rows, comparison.scaling(), strict=True) if row.prediction
    ]
    accumulates = len({row.accumulation_steps for row, _ in rows}) > 1
    named = any(row.name not in _named_by_plan(row.plan) for row, _ in rows)
    several_cards = len({row.prediction.gpu.id for row, _ in rows if row.prediction}) > 1
    columns = [Column("\nGPUs"), Column("\nplan", justify="left")] if named else []
    columns += [Column("\nverdict", justify="left"), Column("device\nmemory")]
    columns += [Column("accum.\nsteps", 3)] if accumulates else []
    columns += [Column("time\nper step", 2), Column("samples/s\nin total"), Column("samples/s\nper GPU", 1)]
    columns += [Column("\nscaling")]
    columns += [Column("\nGPU", justify="left")] if several_cards else []
    table = AdaptiveTable("\ntraining" if named else "\nplan", columns, name_width=22)
    for row, scaling in rows:
        assert row.prediction is not None
        rank, time = fullest_rank(row.prediction), row.prediction.time
        cells: list[str | Text] = [_count(row.plan), strategy_name(row.plan)] if named else []
        cells += [Text(rank.verdict, style=VERDICT_STYLES[rank.verdict]), human_bytes(rank.memory.device_bytes)]
        cells += [str(row.accumulation_steps)] if accumulates else []
        cells += ["" if time is None else seconds(time.step_seconds), *_rates(scaling)]
        cells += [row.prediction.gpu.id] if several_cards else []
        table.add_row(row.name if named else plan_name(row.plan), *cells)
    return table


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
    measured = [_measured_in_experiment(row, samples) for row in comparison.rows]
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


def comparison_page(comparison: Comparison) -> Group:
    """Return a page with one row for each training."""
    if comparison.measured:
        page = _measured_page(comparison)
    else:
        page = gpus_for_page(comparison) if comparison.is_across_gpus else _predicted_page(comparison)
    title, *rest = page.renderables
    return Group(title, *subject_lines(comparison.predictions), *rest)


def run_line(name: str, measurement: Measurement | None, error: Exception | None, from_record: bool) -> str:
    """Return one finished run in a line: ``fp16: 9.12 GiB, 108 ms per step``."""
    if measurement is None:
        return f"{name}: failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    size = measurement.peak_reserved_bytes if measurement.device_bytes is None else measurement.device_bytes
    outcome = human_bytes(size) if measurement.status == "completed" else measurement.status
    step = "" if measurement.step_seconds is None else f", {seconds(measurement.step_seconds)} per step"
    return f"{name}: {outcome}{step}{' (from its record)' if from_record else ''}"


def _predicted_page(comparison: Comparison) -> Group:
    predictions = comparison.predictions
    gpus = {prediction.gpu.name: prediction.gpu.memory_bytes for prediction in predictions}
    where = "".join(f" on {name} ({human_bytes(memory)})" for name, memory in gpus.items()) if len(gpus) == 1 else ""
    parts: list[RenderableType] = [Text(f"{SECTIONS['peak']}{where}", style="bold"), Text()]
    if comparison.on_several_gpus and comparison.source:
        return experiment_page(comparison)
    if comparison.on_several_gpus:
        parts += [scaling_table(comparison), *_dim(EXPLANATION), *_costs_from(predictions)]
        return Group(*parts)
    if not comparison.source:
        parts.append(_predictions(predictions, with_gpu=len(gpus) > 1))
        parts += _remark(comparison)
        parts += _costs_from(predictions)
        return Group(*parts)
    unit = "All sizes are in MiB, which the source calls MB."
    parts += [_published_memory(comparison), *_dim(f"{unit} Published: {comparison.source}.")]
    return Group(*parts, *_remark(comparison), *_published_times(comparison))


def _dim(text: str) -> list[RenderableType]:
    return [Text(), Text(text, style="dim")]


def _remark(comparison: Comparison) -> list[RenderableType]:
    return _dim(comparison.remark) if comparison.remark else []


def _costs_from(predictions: Sequence[Prediction]) -> list[RenderableType]:
    """Return a line with the sources of the predicted times; nothing without times."""
    sources = dict.fromkeys(each.time.priced_by for each in predictions if each.time is not None)
    return _dim(f"Kernel times from: {'; '.join(sources)}.") if sources else []


def _predictions(predictions: Sequence[Prediction], *, with_gpu: bool) -> AdaptiveTable:
    with_time = any(prediction.time is not None for prediction in predictions)
    columns = [Column("\nverdict", justify="left"), Column("device\nmemory"), Column("vs.\nfirst", 1)]
    columns += [Column("\nallocated", 2), Column("\nreserved", 3)]
    columns += [Column("time\nper step"), Column("samples\nper s")] if with_time else []
    columns += [Column("\nGPU", justify="left")] if with_gpu else []
    table = AdaptiveTable("\ntraining", columns)
    first = predictions[0].memory.device_bytes if predictions else 0
    for index, prediction in enumerate(predictions):
        memory = prediction.memory
        cells: list[str | Text] = [verdict_cell(prediction), human_bytes(memory.device_bytes)]
        cells.append(difference(memory.device_bytes - first) if index else "")
        cells += [human_bytes(memory.peak_allocated_bytes), human_bytes(memory.peak_reserved_bytes)]
        if with_time:
            pace = total_rate(prediction) if prediction.fits else None
            cells.append("" if prediction.time is None else seconds(prediction.time.step_seconds))
            cells.append("" if pace is None else rate(pace))
        table.add_row(prediction.name, *cells, *([prediction.gpu.id] if with_gpu else []))
    return table


def _published_memory(comparison: Comparison) -> AdaptiveTable:
    """Return the predicted and published sizes in MiB, the unit of the published ones."""
    columns = (Column("\nverdict", justify="left"), Column("\npredicted"), Column("\npublished"), Column("\nerror"))
    table = AdaptiveTable("\ntraining", (*columns, Column("vs.\nfirst", 1)))
    first = mebibytes(comparison.predictions[0].memory.device_bytes) if comparison.predictions else 0
    for index, row in enumerate(comparison.rows):
        if row.prediction is None or row.published is None or row.published.memory_bytes is None:
            continue
        known = mebibytes(row.published.memory_bytes)
        predicted = mebibytes(row.prediction.memory.device_bytes)
        error, change = signed_percent(predicted - known, known), f"{predicted - first:+d}" if index else ""
        table.add_row(row.name, verdict_cell(row.prediction), str(predicted), str(known), error, change)
    return table


def _published_times(comparison: Comparison) -> list[RenderableType]:
    """Return a section with the time of as many samples as the source took; nothing where it gives no times."""
    samples = comparison.samples
    rows = [
        (row.name, row.prediction.time, row.published.seconds)
        for row in comparison.rows
        if row.prediction is not None and row.prediction.time is not None and row.published and row.published.seconds
    ]
    if not samples or not rows:
        return []
    columns = (Column("predicted"), Column("90 % interval"), Column("published"), Column("error"))
    table = AdaptiveTable("training", columns)
    for name, time, known in rows:
        predicted = samples / time.samples_per_second
        low, high = (predicted * end / time.step_seconds for end in time.interval_seconds)
        error = signed_percent(predicted - known, known, 0)
        table.add_row(name, seconds(predicted), f"{low:.0f} to {high:.0f} s", seconds(known), error)
    predictions = [row.prediction for row in comparison.rows if row.prediction is not None]
    return [section(f"Time for {samples} samples", table, *_costs_from(predictions))]


def _measured_page(comparison: Comparison) -> Group:
    parts: list[RenderableType] = [
        Text(f"Measured on {', '.join(comparison.gpus) or 'a GPU'}", style="bold"),
        Text(_setup(comparison), style="dim"),
        Text(),
        _measured(comparison),
    ]
    if comparison.source and comparison.on_several_gpus:
        parts.append(section(SECTIONS["published"], experiment_page(comparison)))
    elif comparison.source:
        source = f"Published: {comparison.source}. {comparison.remark}".rstrip()
        parts.append(section(SECTIONS["published"], _measured_and_published(comparison), *_dim(source)))
    out_of_memory = [(row.name, _out_of_memory(row)) for row in comparison.rows if row.ran_out]
    failed = [(row.name, row.errors[0]) for row in comparison.rows if row.errors]
    unpredicted = [(row.name, row.prediction_error) for row in comparison.rows if row.prediction is None]
    paces = [(row.name, pace) for row in comparison.rows if (pace := run_sentences.compared_pace(row))]
    slowed = [(row.name, lines) for row in comparison.rows if (lines := run_sentences.compared_slowdowns(row))]
    explained = (("out_of_memory", out_of_memory), ("failed", failed), ("not_predicted", unpredicted))
    for name, entries in (*explained, ("host_pace", paces), ("power", slowed)):
        if entries:
            parts.append(section(SECTIONS[name], _explanations(entries)))
    return Group(*parts)


def _setup(comparison: Comparison) -> str:
    memory = "as nvidia-smi shows it" if _figure(comparison) == "device_bytes" else "as reserved by PyTorch"
    repeats = f"; medians of {comparison.repeats} runs, with the range where they differ" * (comparison.repeats > 1)
    group = f"; records: {comparison.group}" if comparison.group else ""
    return f"Each run is a fresh process; memory {memory}{repeats}{group}."


def _figure(comparison: Comparison) -> str:
    """Return the figure to compare: device memory, unless the driver did not report it for a run."""
    known = all(each.device_bytes is not None for row in comparison.rows for each in row.completed)
    return "device_bytes" if known else "peak_reserved_bytes"


def _measured(comparison: Comparison) -> AdaptiveTable:
    figure, rows = _figure(comparison), comparison.rows
    samples = None if comparison.source else comparison.samples
    with_time = any(_predicted_step(row) is not None for row in rows)
    columns = [Column("predicted\nmemory"), Column("measured\nmemory"), Column("\ngap")]
    columns += [Column("predicted\nstep", 1)] if with_time else []
    columns += [Column("measured\nstep"), Column("samples\nper s", 2)]
    columns += [Column(f"{samples}\nsamples", 3)] if samples else []
    table = AdaptiveTable("\ntraining", columns, name_width=20)
    for row in rows:
        cells: list[str | Text] = [_predicted_memory(row, figure), _outcome(row, figure), _gap(row, figure)]
        cells += [_predicted_time(row)] if with_time else []
        cells += [_spread(row.spread("step_seconds"), seconds), _spread(row.total_rate, rate)]
        cells += [_total_time(row, samples)] if samples else []
        table.add_row(row.name, *cells)
    return table


def _measured_and_published(comparison: Comparison) -> AdaptiveTable:
    """Return memory and, where the source gives it, the time of as many samples."""
    figure, samples = _figure(comparison), comparison.samples
    columns = [Column("measured\nmemory"), Column("published\nmemory")]
    if samples:
        columns += [Column(f"measured\n{samples} samples"), Column(f"published\n{samples} samples")]
    table = AdaptiveTable("\ntraining", columns)
    for row in comparison.rows:
        if row.published is None:
            continue
        theirs = "" if row.published.memory_bytes is None else human_bytes(row.published.memory_bytes)
        cells: list[str | Text] = [_outcome(row, figure), theirs]
        if samples:
            known = row.published.seconds
            cells += [_total_time(row, samples), "" if known is None else seconds(known)]
        table.add_row(row.name, *cells)
    return table


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


def _predicted_step(row: ComparisonRow) -> float | None:
    time = row.prediction.time if row.prediction is not None else None
    return None if time is None else time.step_seconds


def _predicted_time(row: ComparisonRow) -> str:
    step = _predicted_step(row)
    return "" if step is None else seconds(step)


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


def _explanations(entries: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for name, text in entries:
        table.add_row(Text(name, style="bold"), Text(text))
    return table
