"""A script on several GPUs, as a page.

Pages for a script that trains: GPU memory by owner, and a watched run after it ended.

Page of ``trainatomy data``: a DataLoader by its settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from trainatomy.reporters import run_sentences, sentences
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
from trainatomy.reporters.labels import COLUMNS, FIGURES, SECTIONS, STATUS_STYLES, component
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.reporters.text.gpus import gpus_table
from trainatomy.reporters.text.host import host_section
from trainatomy.reporters.text.memory import breakdown
from trainatomy.reporters.text.prediction import verdict_cell
from trainatomy.results.fit import ScriptCandidate, ScriptFit
from trainatomy.results.loader import LoaderReport, LoaderTiming
from trainatomy.results.measurement import Measurement, Utilization
from trainatomy.results.prediction import Prediction
from trainatomy.units import exact_bytes, human_bytes, many, mebibytes, rate, seconds, signed_percent


def script_fit_page(found: ScriptFit) -> Document:
    """Return the candidates of a search over a script's flags, and the best one's command."""
    names = list(dict.fromkeys(name for each in found.candidates for name in each.flags))
    columns = (words(), *map(Column, names), words("verdict", wraps=False), Column("needs"))
    paces = (Column("time\nper step"), Column("samples\nper s"))
    rows = (
        ("best" if each is found.best else "", *(each.flags.get(name, "") for name in names), *_outcome(each))
        for each in found.candidates
    )
    parts: list[Part] = [Text(), Table((*columns, *paces), tuple(rows), name_width=6)]
    if said := list(_messages(found)):
        parts += [Text(), Bullets(said)]
    return Document(tuple(parts), f"{found.name} on {found.gpu}. {_answer(found)}")


def _outcome(candidate: ScriptCandidate) -> tuple[str | Text, ...]:
    prediction = candidate.prediction
    if candidate.failed or prediction is None:
        return "failed", "-", "-", "-"
    time = prediction.time if candidate.fits else None
    paces = ("-", "-") if time is None else (seconds(time.step_seconds), rate(time.samples_per_second))
    return verdict_cell(prediction), human_bytes(prediction.memory.device_bytes), *paces


def _answer(found: ScriptFit) -> str:
    """Return which command is the fastest that fits, or why there is none."""
    failed, others = len(found.failed), len(found.candidates) - len(found.failed)
    if found.best is not None and found.maximized:
        value, command = found.best.flags[found.maximized], " ".join(found.best.command)
        larger = [each for each in found.candidates[found.candidates.index(found.best) :] if not each.failed][1:2]
        beyond = f"{larger[0].flags[found.maximized]} would not fit" if larger else "no larger value could be tried"
        return f"Largest {found.maximized} that fits: {value} ({beyond}): {command}"
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


def scripts_page(predictions: Sequence[Prediction]) -> Document:
    """Return a script on several GPUs: verdict, headroom, step time and throughput."""
    fitting = sum(each.fits for each in predictions)
    answer = f"{predictions[0].name} as it is fits on {fitting} of {many(len(predictions), 'GPU')}."
    run = predictions[0].script
    script = [] if run is None else listed(SECTIONS["script"], script_sentences(run))
    return Document((Text(), gpus_table(predictions), *script), answer)


def utilization_text(use: Utilization) -> Document:
    """Return the line that the guides print, and a table of who holds how much below it."""
    used = "not reported by the driver" if use.used_bytes is None else f"{mebibytes(use.used_bytes)} MiB"
    rows = [
        (f"{'  ' * indent}{title}", human_bytes(count), exact_bytes(count))
        for indent, title, count in _owners(use)
        if count is not None
    ]
    return Document((grid(rows, "left", "right", "right"),), f"GPU memory occupied: {used} ({use.gpu})")


def _owners(use: Utilization) -> tuple[tuple[int, str, int | None], ...]:
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


def summary_page(measurement: Measurement, prediction: Prediction | None) -> Document:
    """Return a page on a watched training: outcome, speed, memory at the peak and by stage, and the prediction."""
    return Document(tuple(_summary(measurement, prediction)))


def _summary(measurement: Measurement, prediction: Prediction | None) -> Iterator[Part]:
    memory, failure = measurement.memory, measurement.out_of_memory
    yield _headline(measurement)
    yield Text(sentences.speed(measurement))
    if failure is not None:
        yield Text(sentences.out_of_memory(failure, predicted=False))
    if memory is not None:
        title = SECTIONS["measured_peak" if failure is None else "measured_failure"]
        yield section(title, breakdown(memory))
        yield section(f"The peak is {sentences.instant(memory.peak)}.")
    yield section(SECTIONS["stages"], _stages(measurement))
    for name, lines in run_sentences.of_run(measurement, prediction.time if prediction else None).items():
        yield from listed(SECTIONS[name], lines)
    if measurement.host_bill is not None:
        predicted = None if prediction is None else prediction.host_bill
        yield (
            host_section(measurement.host_bill) if predicted is None else host_section(predicted, measurement.host_bill)
        )
    if prediction is not None:
        yield section(SECTIONS["prediction"], _gaps(measurement, prediction))
    yield from listed(SECTIONS["notes"], measurement.notes)


def _headline(measurement: Measurement) -> Text:
    status = Text(measurement.status, style=f"bold {STATUS_STYLES[measurement.status]}")
    steps = many(measurement.steps, "optimizer step")
    return Text.assemble(status, f": {measurement.name} on {measurement.gpu}, {steps}")


def _stages(measurement: Measurement) -> Table:
    return table(
        measurement.stages,
        words(cell=lambda stage: stage.name),
        Column("this process", lambda stage: "-" if stage.device_bytes is None else human_bytes(stage.device_bytes)),
        Column("reserved", lambda stage: human_bytes(stage.reserved_bytes)),
        Column("allocated", lambda stage: human_bytes(stage.allocated_bytes)),
    )


def _gaps(measurement: Measurement, prediction: Prediction) -> Table:
    measured = {} if measurement.memory is None else measurement.memory.components.as_dict()
    found: list[tuple[str, int | None, int]] = [
        (component(name).title, count, prediction.memory.components[name]) for name, count in measured.items()
    ]
    found += [
        (FIGURES[name], getattr(measurement, name), getattr(prediction.memory, name))
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    ]
    rows = [
        (title, human_bytes(held), human_bytes(known), signed_percent(known - held, held) if held else "-")
        for title, held, known in found
        if held is not None
    ]
    return figures(rows, "", numbers=[COLUMNS[name] for name in ("measured", "predicted", "gap")])


_HEADS = ("per batch", "first batch", "fetching", "step", "memory", "/dev/shm")


def loader_page(report: LoaderReport) -> Document:
    """Return which settings suffice, the table of all, and what to know about them."""
    style = "bold" if report.step is None else "bold green" if report.best is not None else "bold yellow"
    answer = Text(run_sentences.answer(report), style=style)
    setup = map(Text, run_sentences.setup(report))
    timings = section(SECTIONS["loader"], _loader(report))
    return Document((answer, *setup, timings, *listed(SECTIONS["notes"], run_sentences.notes(report))))


def _loader(report: LoaderReport) -> Table:
    rows = [
        (f"{timing.settings.num_workers}{' ←' if place == report.best else ''}", *_cells(timing))
        for place, timing in enumerate(report.timings)
    ]
    return figures(rows, "workers", numbers=_HEADS)


def _cells(timing: LoaderTiming) -> list[str]:
    if timing.problem:
        return [run_sentences.PROBLEMS[timing.problem], *["-"] * (len(_HEADS) - 1)]
    times = (timing.batch_seconds, timing.first_batch_seconds, timing.fetch_seconds, timing.step_seconds)
    memory = "-" if timing.worker_bytes is None else human_bytes(timing.worker_bytes)
    return [*("-" if each is None else seconds(each) for each in times), memory, human_bytes(timing.shared_bytes)]
