"""A script on several GPUs, as a page.

Pages for a script that trains: GPU memory by owner, and a watched run after it ended.

Page of ``trainatomy data``: a DataLoader by its settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import run_sentences, sentences
from trainatomy.reporters.labels import COLUMNS, FIGURES, SECTIONS, STATUS_STYLES, component
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.reporters.text.gpus import gpus_table
from trainatomy.reporters.text.memory import Breakdown
from trainatomy.reporters.text.prediction import verdict_cell
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, bullets, figures, grid, section
from trainatomy.results.fit import ScriptFit
from trainatomy.results.loader import LoaderReport, LoaderTiming
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.units import exact_bytes, human_bytes, many, mebibytes, rate, seconds, signed_percent


def script_fit_page(found: ScriptFit) -> Group:
    """Return the candidates of a search over a script's flags, and the best one's command."""
    best = found.best
    names = list(dict.fromkeys(name for each in found.candidates for name in each.flags))
    columns = [*(Column(name) for name in names), Column("verdict", justify="left"), Column("needs")]
    table = AdaptiveTable("", [*columns, Column("time\nper step"), Column("samples\nper s")], name_width=6)
    for each in found.candidates:
        flags = [each.flags.get(name, "") for name in names]
        mark = "best" if each is best else ""
        if each.failed or each.prediction is None:
            table.add_row(mark, *flags, "failed", "-", "-", "-")
            continue
        needed, time = human_bytes(each.prediction.memory.device_bytes), each.prediction.time
        step = seconds(time.step_seconds) if time and each.fits else "-"
        pace = rate(time.samples_per_second) if time and each.fits else "-"
        table.add_row(mark, *flags, verdict_cell(each.prediction), needed, step, pace)
    parts: list[RenderableType] = [Text(f"{found.name} on {found.gpu}. {_answer(found)}", style="bold"), Text(), table]
    if said := list(_messages(found)):
        parts += [Text(), bullets(said)]
    return Group(*parts)


def _answer(found: ScriptFit) -> str:
    """Return which command is the fastest that fits, or why there is none."""
    failed, others = len(found.failed), len(found.candidates) - len(found.failed)
    if found.best is not None:
        return f"Fastest that fits: {' '.join(found.best.command)}"
    if not others:
        return f"The script failed with {'all' if failed > 1 else 'the'} values of its flags: {found.failed[0].message}"
    return f"Nothing fits of {many(others, 'run')}; {many(failed, 'other')} failed." if failed else "Nothing fits."


def _messages(found: ScriptFit) -> Iterator[str]:
    """Yield each message with the flags of the runs that it ended; all of them need not be named."""
    flags: dict[str, list[str]] = {}
    for each in found.candidates:
        if each.message:
            flags.setdefault(each.message, []).append(" ".join(f"{name} {value}" for name, value in each.flags.items()))
    for message, ended in flags.items():
        is_named = len(ended) < len(found.candidates)
        yield f"{'; '.join(ended)}: {message}" if is_named else message


def scripts_page(predictions: Sequence[Prediction]) -> Group:
    """Return a script on several GPUs: verdict, headroom, step time and throughput."""
    fitting = sum(each.fits for each in predictions)
    answer = f"{predictions[0].name} as it is fits on {fitting} of {many(len(predictions), 'GPU')}."
    parts: list[RenderableType] = [Text(answer, style="bold"), Text(), gpus_table(predictions)]
    if (run := predictions[0].script) is not None:
        parts.append(section(SECTIONS["script"], bullets(script_sentences(run))))
    return Group(*parts)


class GPUUse(Protocol):
    """Memory of a GPU by owner, in bytes; ``None`` where not known (``integrations.reading.Utilization``)."""

    @property
    def gpu(self) -> str: ...
    @property
    def used_bytes(self) -> int | None: ...
    @property
    def driver_bytes(self) -> int | None: ...
    @property
    def process_bytes(self) -> int | None: ...
    @property
    def other_bytes(self) -> int | None: ...
    @property
    def others(self) -> int | None: ...
    @property
    def unlisted_bytes(self) -> int | None: ...
    @property
    def can_hide(self) -> bool: ...
    @property
    def context_bytes(self) -> int | None: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...


def utilization_text(use: GPUUse) -> Group:
    """Return the line that the guides print, and a table of who holds how much below it."""
    used = "not reported by the driver" if use.used_bytes is None else f"{mebibytes(use.used_bytes)} MiB"
    table = grid("left", "right", "right")
    for indent, title, count in _owners(use):
        if count is not None:
            table.add_row(f"{'  ' * indent}{title}", human_bytes(count), exact_bytes(count))
    return Group(Text(f"GPU memory occupied: {used} ({use.gpu})", style="bold"), table)


def _owners(use: GPUUse) -> tuple[tuple[int, str, int | None], ...]:
    hidden = " (a container does not see processes outside of it)" if use.can_hide else ""
    return (
        (1, "driver", use.driver_bytes),
        (1, "this process", use.process_bytes),
        (2, component("context").title, use.context_bytes),
        (2, "reserved by PyTorch", use.reserved_bytes),
        (3, "allocated to tensors", use.allocated_bytes),
        (3, component("cache").title, use.reserved_bytes - use.allocated_bytes),
        (1, f"other processes ({use.others})", use.other_bytes if use.others else None),
        (1, f"not listed for any process{hidden}", use.unlisted_bytes or None),
    )


def speed_text(metrics: Mapping[str, Any]) -> Text:
    """Return time and samples per second from a ``TrainOutput``'s metrics, as the guides print them."""
    lines = []
    for title, name in (("Time", "train_runtime"), ("Samples/second", "train_samples_per_second")):
        if name in metrics:
            lines.append(f"{title}: {metrics[name]:.2f}")
    return Text("\n".join(lines))


def summary_page(measurement: Measurement, prediction: Prediction | None) -> Group:
    """Return a page on a watched training: outcome, speed, memory at the peak and by stage, and the prediction."""
    memory, failure = measurement.memory, measurement.out_of_memory
    parts: list[RenderableType] = [_headline(measurement), Text(sentences.speed(measurement))]
    if failure is not None:
        parts.append(Text(sentences.out_of_memory(failure, predicted=False)))
    if memory is not None:
        title = SECTIONS["measured_peak" if failure is None else "measured_failure"]
        parts.append(section(title, Breakdown(memory)))
        parts.append(section(f"The peak is {sentences.instant(memory.peak)}."))
    parts.append(section(SECTIONS["stages"], _stages(measurement)))
    for name, lines in run_sentences.of_run(measurement, prediction.time if prediction else None).items():
        parts.append(section(SECTIONS[name], bullets(lines)))
    if prediction is not None:
        parts.append(section(SECTIONS["prediction"], _gaps(measurement, prediction)))
    if measurement.notes:
        parts.append(section(SECTIONS["notes"], bullets(measurement.notes)))
    return Group(*parts)


def _headline(measurement: Measurement) -> Text:
    status = Text(measurement.status, style=f"bold {STATUS_STYLES[measurement.status]}")
    steps = many(measurement.steps, "optimizer step")
    return Text.assemble(status, f": {measurement.name} on {measurement.gpu}, {steps}")


def _stages(measurement: Measurement) -> Table:
    table = figures("", numbers=("this process", "reserved", "allocated"))
    for stage in measurement.stages:
        held = "-" if stage.device_bytes is None else human_bytes(stage.device_bytes)
        table.add_row(stage.name, held, human_bytes(stage.reserved_bytes), human_bytes(stage.allocated_bytes))
    return table


def _gaps(measurement: Measurement, prediction: Prediction) -> Table:
    table = figures("", numbers=[COLUMNS[name] for name in ("measured", "predicted", "gap")])
    measured = {} if measurement.memory is None else measurement.memory.components.as_dict()
    rows: list[tuple[str, int | None, int]] = [
        (component(name).title, count, prediction.memory.components[name]) for name, count in measured.items()
    ]
    rows += [
        (FIGURES[name], getattr(measurement, name), getattr(prediction.memory, name))
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    ]
    for title, found, expected in rows:
        if found is not None:
            gap = signed_percent(expected - found, found) if found else "-"
            table.add_row(title, human_bytes(found), human_bytes(expected), gap)
    return table


_HEADS = ("per batch", "first batch", "fetching", "step", "memory", "/dev/shm")


def loader_page(report: LoaderReport) -> Group:
    """Return which settings suffice, the table of all, and what to know about them."""
    style = "bold" if report.step is None else "bold green" if report.best is not None else "bold yellow"
    parts: list[RenderableType] = [Text(run_sentences.answer(report), style=style)]
    parts += [Text(line) for line in run_sentences.setup(report)]
    parts.append(section(SECTIONS["loader"], _table(report)))
    if lines := run_sentences.notes(report):
        parts.append(section(SECTIONS["notes"], bullets(lines)))
    return Group(*parts)


def _table(report: LoaderReport) -> Table:
    table = figures("workers", numbers=_HEADS)
    for place, one in enumerate(report.timings):
        mark = " ←" if place == report.best else ""
        table.add_row(f"{one.settings.num_workers}{mark}", *_cells(one))
    return table


def _cells(one: LoaderTiming) -> list[str]:
    if one.problem:
        return [run_sentences.PROBLEMS[one.problem], *["-"] * (len(_HEADS) - 1)]
    times = (one.batch_seconds, one.first_batch_seconds, one.fetch_seconds, one.step_seconds)
    memory = "-" if one.worker_bytes is None else human_bytes(one.worker_bytes)
    return [*("-" if each is None else seconds(each) for each in times), memory, human_bytes(one.shared_bytes)]
