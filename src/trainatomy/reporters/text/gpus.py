"""One training on many GPUs: with the best settings of each, or as it is.

The data that ships, and a calibration: GPUs, architectures and measured costs, with their sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from rich.text import Text

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.calibrations import Calibration, CollectivePoint
from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.catalog.instances import Instance
from trainatomy.catalog.mig import mig_profiles
from trainatomy.reporters import run_sentences, settings
from trainatomy.reporters.document import (
    Bullets,
    Column,
    Document,
    Part,
    Table,
    figures,
    grid,
    listed,
    section,
    table,
    words,
)
from trainatomy.reporters.labels import CALIBRATION, LIMITS, SECTIONS, VERDICT_STYLES
from trainatomy.reporters.search_sentences import fastest_and_cheapest, gpus_time_notes
from trainatomy.reporters.text.prediction import subject_of, verdict_cell
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import FitAcross, GPUOption
from trainatomy.results.prediction import Prediction, total_rate
from trainatomy.timing.evidence import Finding, evidence_of, findings
from trainatomy.units import count_of, exact_bytes, human_bytes, many, percent, rate, seconds


def gpus_fit_page(across: FitAcross) -> Document:
    """Return which GPUs can run a training, with the best settings of each, how fast and for how much."""
    fitting = [option for option in across.options if option.fit.best is not None]
    answer = f"{across.name} fits on {len(fitting)} of {many(len(across.options), 'GPU')}"
    if fitting:
        costs = {option.gpu.name: option.cost_per_million_samples for option in fitting}
        answer += f"; {fastest_and_cheapest(fitting[0].gpu.name, costs)}"
    return Document(tuple(_across(across)), f"{answer}.")


def _across(across: FitAcross) -> Iterator[Part]:
    held = f"Effective batch size {across.effective_batch_size}"
    allowed = f"; allowed to change: {', '.join(across.allowed)}" if across.allowed else ""
    setup = f"{held}; {percent(across.headroom, 1, 0)} of each GPU's memory is kept free{allowed}."
    yield subject_of([each for option in across.options for each in option.fit.predictions])
    yield Text(setup, style="dim")
    if across.interrupted:
        yield Text("The search was interrupted: this is what was found so far.", style="bold yellow")
    yield Text()
    yield _options(across.options)
    yield from _below(gpus_time_notes([each.fit.best.prediction for each in across.options if each.fit.best]))
    yield from listed(SECTIONS["fit_refused"], across.refused)
    taken = f"Searched in {seconds(across.seconds)} without a GPU. For everything about one of them: --gpu GPU."
    yield Text()
    yield Text(taken, style="dim")


def _below(sentences: Sequence[str]) -> list[Part]:
    """Return sentences below an empty line."""
    return [Text(), Bullets(sentences)] if sentences else []


def _options(options: Sequence[GPUOption]) -> Table:
    """Return one row for each GPU: those on which it fits, then the others with the shortfall."""
    return table(
        options,
        words("\nGPU", lambda each: each.gpu.name, min_width=12),
        Column("\nmemory", lambda each: human_bytes(each.gpu.memory_bytes)),
        Column("\nsamples/s", lambda each: rate(each.fit.best.samples_per_second) if each.fit.best else "-"),
        Column(
            "cost per\nM samples",
            lambda each: _cost(each.cost_per_million_samples),
            is_shown=any(each.cost_per_hour is not None for each in options),
        ),
        words(
            "\nsettings",
            lambda each: settings.settings_of(each.fit.best) if each.fit.best else _shortfall(each),
            ratio=1,
        ),
    )


def _cost(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:,.2f}"


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


def gpus_table(predictions: Sequence[Prediction], costs: Mapping[str, float | None] | None = None) -> Table:
    """Return a table of the same training on several GPUs, the fastest first.

    ``costs`` are those of a million samples by the GPU's id; without any there is no such column.
    """
    return table(
        sorted(predictions, key=_fastest_first),
        words("\nGPU", lambda each: each.gpu.name),
        words("\nverdict", verdict_cell, wraps=False),
        Column("\nneeds", lambda each: human_bytes(each.memory.device_bytes)),
        Column("\nheadroom", lambda each: human_bytes(each.room_bytes)),
        Column("time\nper step", lambda each: seconds(each.time.step_seconds) if each.time and each.fits else "-"),
        Column("samples\nper s", _throughput),
        Column("cost per\nM samples", lambda each: _cost((costs or {}).get(each.gpu.id)), is_shown=bool(costs)),
        words(
            "\nbound by",
            lambda each: LIMITS[each.time.bound_by] if each.time and each.fits else "",
            wraps=False,
            rank=1,
        ),
        words("\nid", lambda each: each.gpu.id, wraps=False, rank=2),
        name_width=20,
    )


def _throughput(prediction: Prediction) -> str:
    total = total_rate(prediction) if prediction.fits else None
    return "-" if total is None else rate(total)


def gpus_for_page(comparison: Comparison) -> Document:
    """Return the same training, as it is, on several GPUs: verdict, headroom, step time, throughput and cost."""
    predictions = sorted(comparison.predictions, key=_fastest_first)
    name = _model(predictions[0]) if predictions else "The training"
    fitting = sum(prediction.fits for prediction in predictions)
    rows = comparison.fastest_first() if comparison.costs_per_hour else ()
    costs = {row.prediction.gpu.id: comparison.cost_per_million_samples(row) for row in rows if row.prediction}
    answer = f"{name} as it is fits on {fitting} of {many(len(predictions), 'GPU')}{_cheapest(comparison)}."
    failed = [f"{row.name}: {row.prediction_error}" for row in comparison.rows if row.prediction is None]
    closing = Text("For the fastest settings that fit each GPU: trainatomy fit --gpu all.", style="dim")
    return Document(
        (
            Text(),
            gpus_table(predictions, costs),
            *_below(gpus_time_notes([each for each in predictions if each.fits])),
            *([section("Not predicted", Bullets(failed), indent=0)] if failed else []),
            Text(),
            closing,
        ),
        answer,
    )


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
_IDENTITY = frozenset({"id", "name", "device_name", "slice_of", "aliases", "sources", "assumed"})


def catalog_table(gpus: Sequence[GPU]) -> Document:
    """Return a table with one row for each GPU; ``*`` marks assumed figures."""
    numbers = ("\nmemory", "\ncc", "\nSMs", "\nGB/s", "16-bit\nTFLOP/s", "\ncontext")
    rows = ((gpu.id, gpu.name, *_row(gpu)) for gpu in gpus)
    closing = (
        "* assumed; all other figures are measured or published. Sources: trainatomy gpus GPU. cc: compute capability, "
        "or an AMD GPU's architecture. "
        "context: memory that the first tensor adds outside PyTorch's allocator, with current software. "
        "trainatomy gpus GPU also lists the MIG instances of one, such as h200:3g.71gb. Machines of clouds: "
        "trainatomy gpus --instances."
    )
    listing = figures(rows, "\nGPU", "\nname", numbers=numbers, folded=1)
    return Document((listing, Text(), Text(closing, style="dim")))


def _row(gpu: GPU) -> tuple[str, ...]:
    rate = gpu.rates.get("bf16", gpu.rates.get("fp16"))
    context = gpu.contexts.get("lazy")
    held = human_bytes(context.first_tensor_bytes) if context and context.first_tensor_bytes else "-"
    return (
        _marked(gpu, "memory_bytes", human_bytes(gpu.memory_bytes)),
        gpu.architecture or ".".join(map(str, gpu.capability)),
        str(gpu.multiprocessors),
        _marked(gpu, "bandwidth_bytes_per_second", f"{gpu.bandwidth_bytes_per_second / 1e9:.0f}"),
        "-" if rate is None else _marked(gpu, "rates", f"{rate / 1e12:.0f}"),
        _marked(gpu, "contexts.lazy.first_tensor_bytes", held),
    )


def _marked(gpu: GPU, field: str, value: str) -> str:
    return f"{value}*" if gpu.source(field).startswith("assumed") else value


def gpu_page(gpu: GPU) -> Document:
    """Return everything that is known of one GPU, grouped by source."""
    names = f"{gpu.id}; also: {', '.join(gpu.aliases)}" if gpu.aliases else gpu.id
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in _figures(gpu).items():
        groups.setdefault(gpu.source(name), []).append((name, value))
    sections = [section("How good predictions are for it", grid(evidence_of(gpu), "left", "left"))]
    sections += [section(source, grid(rows, "left", "left")) for source, rows in groups.items()]
    profiles = [f"{gpu.id}:{profile}" for profile in mig_profiles(gpu)]
    divided = [Text(), Text(f"MIG instances: {', '.join(profiles)}.")] if profiles else []
    return Document((Text(names, style="dim"), *sections, *divided), gpu.name)


def instances_table(machines: Sequence[Instance]) -> Document:
    """Return a table for each cloud, with one row for each machine."""
    closing = (
        "USD/h: list price on demand of the whole machine; -: not known. trainatomy gpus NAME says where and when it "
        "was listed; --price NAME=… replaces it in a prediction with --instance NAME."
    )
    columns = (
        words("machine", lambda each: each.id, wraps=False),
        words("GPUs", lambda each: f"{each.gpus} × {each.gpu}", wraps=False),
        Column("vCPUs", lambda each: str(each.vcpus)),
        Column("memory", lambda each: human_bytes(each.host_memory_bytes)),
        Column("USD/h", lambda each: "-" if each.usd_per_hour is None else f"{each.usd_per_hour:,.2f}"),
    )
    clouds: dict[str, list[Instance]] = {}
    for machine in machines:
        clouds.setdefault(machine.provider, []).append(machine)
    sections = (section(cloud, table(some, *columns)) for cloud, some in clouds.items())
    return Document((*sections, Text(), Text(closing, style="dim")))


def instance_page(machine: Instance) -> Document:
    """Return everything that is known of a machine of a cloud, with its sources."""
    price = "not known" if machine.usd_per_hour is None else f"{machine.usd_per_hour:,.4g} USD an hour"
    rows = [
        ("GPUs", f"{machine.gpus} × {find_gpu(machine.gpu).name} (trainatomy gpus {machine.gpu})"),
        ("virtual processors", f"{machine.vcpus} {machine.processor}"),
        ("host memory", human_bytes(machine.host_memory_bytes)),
        ("network", machine.network or "not known"),
    ]
    listed = f"{machine.price_source}, {machine.price_region}, {machine.price_date}"
    sections = {machine.source: rows, listed: [("on demand", price)]}
    parts = (section(source, grid(found, "left", "left")) for source, found in sections.items())
    return Document((Text(machine.provider, style="dim"), *parts), machine.id)


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
        elif field.name not in _IDENTITY and value not in (None, "", False):
            values[field.name] = _text(value)
    return values


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return exact_bytes(value) if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def architectures_table(architectures: Sequence[ArchitectureEntry]) -> Document:
    """Return a table with one row for each architecture, and the source if it is not the model's page on the Hub."""
    rows = []
    for entry in architectures:
        source = Text(f"\n  {entry.source}" if entry.source != f"{_HUB}{entry.hub_id}" else "", style="dim")
        rows.append((Text(entry.hub_id).append(source), entry.class_name, count_of(entry.parameters)))
    closing = f"Source of a configuration: {_HUB}MODEL, unless another is given. All fields: trainatomy models --json."
    return Document(
        (figures(rows, "model", "class", numbers=("parameters",)), Text(), Text(closing, style="dim")),
    )


def calibration_page(calibration: Calibration, left_out: Sequence[str]) -> Document:
    """Return the findings of a calibration compared with the GPU's data sheet, and the cases not measured."""
    parts = tuple(_calibrated(calibration, left_out))
    return Document(parts, f"{len(calibration.points):,} operations measured")


def _calibrated(calibration: Calibration, left_out: Sequence[str]) -> Iterator[Part]:
    where = calibration.environment
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    setup = f"{where['gpu']}, driver {where['driver']}, {versions}, {where['processor']}, {where['date']}"
    yield Text(setup, style="dim")
    found = findings(calibration)
    for unit, title in CALIBRATION.items():
        if rows := [each for each in found if each.unit == unit]:
            yield section(title, _findings(rows, unit))
    if host := calibration.sections.get("host"):
        yield from listed(SECTIONS["calibrated_host"], run_sentences.calibrated_host(host))
    if calibration.collectives:
        yield section(SECTIONS["collectives"], _collectives(calibration.collectives))
    yield from listed(SECTIONS["not_measured"], tuple(left_out))


def _collectives(points: Sequence[CollectivePoint]) -> Table:
    """Return the time of the smallest message, and the bytes per second of the largest, of each kind."""
    rows = []
    for kind, ranks in dict.fromkeys((each.kind, each.ranks) for each in points):
        same = [each for each in points if (each.kind, each.ranks) == (kind, ranks)]
        same.sort(key=lambda each: each.bytes)
        first, last = same[0], same[-1]
        times = [f"{human_bytes(each.bytes)} in {seconds(each.seconds)}" for each in (first, last)]
        rows.append((kind, f"{ranks} GPUs", *times, f"{last.bytes / last.seconds / 1e9:,.1f}"))
    return figures(rows, "", "", numbers=("smallest", "largest", "GB/s"))


def _findings(rows: Sequence[Finding], unit: str) -> Table:
    compared = any(row.data_sheet for row in rows)
    return table(
        rows,
        words(cell=lambda row: row.name),
        words(cell=lambda row: row.at, wraps=False),
        Column(unit, lambda row: f"{row.measured:,.1f}"),
        Column("data sheet", lambda row: f"{row.data_sheet:,.1f}" if row.data_sheet else "-", is_shown=compared),
        Column(
            "share",
            lambda row: f"{row.measured / row.data_sheet:.0%}" if row.data_sheet else "-",
            is_shown=compared,
        ),
    )
