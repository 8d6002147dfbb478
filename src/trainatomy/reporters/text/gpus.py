"""One training on many GPUs: with the best settings of each, or as it is.

The data that ships, and a calibration: GPUs, architectures and measured costs, with their sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.reporters import run_sentences, settings
from trainatomy.reporters.labels import CALIBRATION, LIMITS, SECTIONS, VERDICT_STYLES
from trainatomy.reporters.search_sentences import fastest_and_cheapest, gpus_time_notes
from trainatomy.reporters.text.prediction import subject_lines, verdict_cell
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, bullets, figures, section
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import FitAcross, GPUOption
from trainatomy.results.prediction import Prediction, total_rate
from trainatomy.units import count_of, exact_bytes, human_bytes, many, percent, rate, seconds

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration, CollectivePoint
    from trainatomy.timing.findings import Finding


def gpus_fit_page(across: FitAcross) -> Group:
    """Return which GPUs can run a training, with the best settings of each, how fast and for how much."""
    fitting = [option for option in across.options if option.fit.best is not None]
    answer = f"{across.name} fits on {len(fitting)} of {many(len(across.options), 'GPU')}"
    if fitting:
        costs = {option.gpu.name: option.cost_per_million_samples for option in fitting}
        answer += f"; {fastest_and_cheapest(fitting[0].gpu.name, costs)}"
    held = f"Effective batch size {across.effective_batch_size}"
    allowed = f"; allowed to change: {', '.join(across.allowed)}" if across.allowed else ""
    setup = f"{held}; {percent(across.headroom, 1, 0)} of each GPU's memory is kept free{allowed}."
    shared = subject_lines([each for option in across.options for each in option.fit.predictions])
    parts: list[RenderableType] = [Text(f"{answer}.", style="bold"), *shared, Text(setup, style="dim")]
    if across.interrupted:
        parts.append(Text("The search was interrupted: this is what was found so far.", style="bold yellow"))
    parts += [Text(), _gpus(across)]
    if notes := gpus_time_notes([option.fit.best.prediction for option in across.options if option.fit.best]):
        parts += [Text(), bullets(notes)]
    if across.refused:
        parts.append(section(SECTIONS["fit_refused"], bullets(across.refused)))
    taken = f"Searched in {seconds(across.seconds)} without a GPU. For everything about one of them: --gpu GPU."
    return Group(*parts, Text(), Text(taken, style="dim"))


def _gpus(across: FitAcross) -> Table:
    """Return one row for each GPU: those on which it fits, then the others with the shortfall."""
    with_cost = any(option.cost_per_hour is not None for option in across.options)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("\nGPU", overflow="fold", min_width=12)
    table.add_column("\nmemory", justify="right", no_wrap=True)
    table.add_column("\nsamples/s", justify="right", no_wrap=True)
    if with_cost:
        table.add_column("cost per\nM samples", justify="right", no_wrap=True)
    table.add_column("\nsettings", overflow="fold", ratio=1)
    for option in across.options:
        best = option.fit.best
        cells = [option.gpu.name, human_bytes(option.gpu.memory_bytes), rate(best.samples_per_second) if best else "-"]
        if with_cost:
            cost = option.cost_per_million_samples
            cells.append("-" if cost is None else f"{cost:,.2f}")
        table.add_row(*cells, settings.settings_of(best) if best else _shortfall(option))
    return table


def _shortfall(option: GPUOption) -> Text:
    """Return what the smallest candidate that was executed lacks, and its settings."""
    text = Text("does not fit", style=VERDICT_STYLES["does not fit"])
    if option.fit.too_large:
        smallest = option.fit.too_large[0]
        missing = smallest.device_bytes - option.fit.usable_bytes
        lack = f"{human_bytes(missing)} short" if missing > 0 else "fragmentation"
        text.append(f": {lack} with {settings.settings_of(smallest)}")
    return text


def _fastest_first(prediction: Prediction) -> tuple[bool, float, int]:
    time = prediction.time
    return not prediction.fits, -time.samples_per_second if time else 0.0, -prediction.gpu.memory_bytes


def _model(prediction: Prediction) -> str:
    """Return what is trained: the model's name, because the rows may be named after the GPUs."""
    model = prediction.workload.get("model")
    names = [model.get(key) for key in ("id", "class", "factory")] if isinstance(model, dict) else []
    return next((str(name) for name in names if name), prediction.name)


def gpus_table(predictions: Sequence[Prediction], costs: Mapping[str, float | None] | None = None) -> AdaptiveTable:
    """Return a table of the same training on several GPUs, the fastest first.

    ``costs`` are those of a million samples by the GPU's id; without any there is no such column.
    """
    columns = [Column("\nverdict", justify="left"), Column("\nneeds"), Column("\nheadroom")]
    columns += [Column("time\nper step"), Column("samples\nper s")]
    columns += [Column("cost per\nM samples")] if costs else []
    columns += [Column("\nbound by", 1, "left"), Column("\nid", 2, "left")]
    table = AdaptiveTable("\nGPU", columns, name_width=20)
    for each in sorted(predictions, key=_fastest_first):
        needed, room = human_bytes(each.memory.device_bytes), human_bytes(each.room_bytes)
        total = total_rate(each) if each.fits else None
        step = seconds(each.time.step_seconds) if each.time and each.fits else "-"
        pace = "-" if total is None else rate(total)
        cost = (costs or {}).get(each.gpu.id)
        priced = ["-" if cost is None else f"{cost:,.2f}"] if costs else []
        bound = LIMITS[each.time.bound_by] if each.time and each.fits else ""
        table.add_row(each.gpu.name, verdict_cell(each), needed, room, step, pace, *priced, bound, each.gpu.id)
    return table


def gpus_for_page(comparison: Comparison) -> Group:
    """Return the same training, as it is, on several GPUs: verdict, headroom, step time, throughput and cost."""
    predictions = sorted(comparison.predictions, key=_fastest_first)
    name = _model(predictions[0]) if predictions else "The training"
    fitting = sum(prediction.fits for prediction in predictions)
    rows = comparison.fastest_first() if comparison.costs_per_hour else ()
    costs = {row.prediction.gpu.id: comparison.cost_per_million_samples(row) for row in rows if row.prediction}
    table = gpus_table(predictions, costs)
    answer = f"{name} as it is fits on {fitting} of {many(len(predictions), 'GPU')}{_cheapest(comparison)}."
    parts: list[RenderableType] = [Text(answer, style="bold"), Text(), table]
    if notes := gpus_time_notes([each for each in predictions if each.fits]):
        parts += [Text(), bullets(notes)]
    if failed := [f"{row.name}: {row.prediction_error}" for row in comparison.rows if row.prediction is None]:
        parts += [Text(), Text("Not predicted", style="bold"), bullets(failed)]
    parts += [Text(), Text("For the fastest settings that fit each GPU: trainatomy fit --gpu all.", style="dim")]
    return Group(*parts)


def _cheapest(comparison: Comparison) -> str:
    """Return which GPU is the fastest and which is the cheapest per sample, if there are prices."""
    rows = comparison.fastest_first()
    costs = {
        row.name: comparison.cost_per_million_samples(row) for row in rows if row.prediction and row.prediction.fits
    }
    if not any(costs.values()):
        return ""
    return f"; {fastest_and_cheapest(rows[0].name, costs)}"


_HUB = "https://huggingface.co/"
_IDENTITY = frozenset({"id", "name", "device_name", "aliases", "sources", "assumed"})


def catalog_table(gpus: Sequence[GPU]) -> Group:
    """Return a table with one row for each GPU; ``*`` marks assumed figures."""
    numbers = ("\nmemory", "\ncc", "\nSMs", "\nGB/s", "16-bit\nTFLOP/s", "\ncontext")
    table = figures("\nGPU", "\nname", numbers=numbers, folded=1)
    for gpu in gpus:
        table.add_row(gpu.id, gpu.name, *_row(gpu))
    closing = (
        "* assumed; all other figures are measured or published. Sources: trainatomy gpus GPU. cc: compute capability. "
        "context: memory that the first tensor adds outside PyTorch's allocator, with current software."
    )
    return Group(table, Text(), Text(closing, style="dim"))


def _row(gpu: GPU) -> tuple[str, ...]:
    rate = gpu.rates.get("bf16", gpu.rates.get("fp16"))
    context = gpu.contexts.get("lazy")
    held = human_bytes(context.first_tensor_bytes) if context else "-"
    return (
        _marked(gpu, "memory_bytes", human_bytes(gpu.memory_bytes)),
        ".".join(map(str, gpu.capability)),
        str(gpu.multiprocessors),
        _marked(gpu, "bandwidth_bytes_per_second", f"{gpu.bandwidth_bytes_per_second / 1e9:.0f}"),
        "-" if rate is None else _marked(gpu, "rates", f"{rate / 1e12:.0f}"),
        _marked(gpu, "contexts.lazy.first_tensor_bytes", held),
    )


def _marked(gpu: GPU, field: str, value: str) -> str:
    return f"{value}*" if gpu.source(field).startswith("assumed") else value


def gpu_page(gpu: GPU) -> Group:
    """Return everything that is known of one GPU, grouped by source."""
    names = f"{gpu.id}; also: {', '.join(gpu.aliases)}" if gpu.aliases else gpu.id
    groups: dict[str, Table] = {}
    for name, value in _figures(gpu).items():
        table = groups.setdefault(gpu.source(name), Table.grid(padding=(0, 2, 0, 0)))
        table.add_row(name, value)
    title = [Text(gpu.name, style="bold"), Text(names, style="dim")]
    return Group(*title, *(section(source, table) for source, table in groups.items()))


def _figures(gpu: GPU) -> dict[str, str]:
    """Return every field as text by its dotted name."""
    values: dict[str, str] = {}
    for field in fields(gpu):
        value = getattr(gpu, field.name)
        if field.name == "contexts":
            for era, context in value.items():
                values[f"contexts.{era}.first_tensor_bytes"] = exact_bytes(context.first_tensor_bytes)
                for library, count in context.loads_bytes.items():
                    values[f"contexts.{era}.loads_bytes.{library}"] = exact_bytes(count)
        elif isinstance(value, Mapping) and field.name not in _IDENTITY:
            values |= {f"{field.name}.{key}": f"{number:.4g}" for key, number in value.items()}
        elif field.name not in _IDENTITY and value is not None:
            values[field.name] = _text(value)
    return values


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return exact_bytes(value) if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def architectures_table(architectures: Sequence[ArchitectureEntry]) -> Group:
    """Return a table with one row for each architecture, and the source if it is not the model's page on the Hub."""
    table = figures("model", "class", numbers=("parameters",), folded=0)
    for entry in architectures:
        source = Text(f"\n  {entry.source}" if entry.source != f"{_HUB}{entry.hub_id}" else "", style="dim")
        table.add_row(Text(entry.hub_id).append(source), entry.class_name, count_of(entry.parameters))
    closing = f"Source of a configuration: {_HUB}MODEL, unless another is given. All fields: trainatomy models --json."
    return Group(table, Text(), Text(closing, style="dim"))


def calibration_page(calibration: Calibration, left_out: Sequence[str]) -> Group:
    """Return the findings of a calibration compared with the GPU's data sheet, and the cases not measured."""
    from trainatomy.timing.findings import findings

    where = calibration.environment
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    setup = f"{where['gpu']}, driver {where['driver']}, {versions}, {where['processor']}, {where['date']}"
    headline = Text(f"{len(calibration.points):,} operations measured", style="bold")
    parts: list[RenderableType] = [headline, Text(setup, style="dim")]
    found = findings(calibration)
    for unit, title in CALIBRATION.items():
        rows = [one for one in found if one.unit == unit]
        if rows:
            parts.append(section(title, _findings(rows, unit)))
    if host := calibration.sections.get("host"):
        parts.append(section(SECTIONS["calibrated_host"], bullets(run_sentences.calibrated_host(host))))
    if calibration.collectives:
        parts.append(section(SECTIONS["collectives"], _collectives(calibration.collectives)))
    if left_out:
        parts.append(section(SECTIONS["not_measured"], bullets(tuple(left_out))))
    return Group(*parts)


def _collectives(points: Sequence[CollectivePoint]) -> Table:
    """Return the time of the smallest message, and the bytes per second of the largest, of each kind."""
    table = figures("", "", numbers=("smallest", "largest", "GB/s"))
    for kind, ranks in dict.fromkeys((one.kind, one.ranks) for one in points):
        rows = sorted((one for one in points if (one.kind, one.ranks) == (kind, ranks)), key=lambda one: one.bytes)
        first, last = rows[0], rows[-1]
        times = [f"{human_bytes(one.bytes)} in {seconds(one.seconds)}" for one in (first, last)]
        table.add_row(kind, f"{ranks} GPUs", *times, f"{last.bytes / last.seconds / 1e9:,.1f}")
    return table


def _findings(rows: Sequence[Finding], unit: str) -> Table:
    compared = any(row.data_sheet for row in rows)
    table = figures("", "", numbers=(unit, *(("data sheet", "share") if compared else ())))
    for row in rows:
        sheet = (f"{row.data_sheet:,.1f}", f"{row.measured / row.data_sheet:.0%}") if row.data_sheet else ("-", "-")
        table.add_row(row.name, row.at, f"{row.measured:,.1f}", *(sheet if compared else ()))
    return table
