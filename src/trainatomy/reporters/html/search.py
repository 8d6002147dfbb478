"""The reports of searches: settings that fit, on one GPU or several, and what would make a training fit."""

from __future__ import annotations

from collections.abc import Sequence

from trainatomy.reporters.html.charts import bars, component_bars, scatter
from trainatomy.reporters.html.from_text import sections_of
from trainatomy.reporters.html.labels import REPORT
from trainatomy.reporters.html.prediction import bill_table, memory_summary
from trainatomy.reporters.html.values import Block, KeyFigure, Page, Section, TextBlock
from trainatomy.reporters.labels import ALARM, AXES, COMPONENTS, HIGHLIGHT, MUTED, SECTIONS, THROUGHPUT
from trainatomy.reporters.search_labels import FIT_MARKS
from trainatomy.reporters.settings import settings_of
from trainatomy.reporters.text.fit import fit_page, shortage_page
from trainatomy.reporters.text.gpus import gpus_fit_page
from trainatomy.results.fit import Candidate, Fit, FitAcross, Shortage
from trainatomy.results.memory import Memory
from trainatomy.units import human_bytes, many, rate, seconds

_FAR = 2.5
"""The limit is drawn unless it is that many times as far as the largest candidate."""
_BEST = COMPONENTS["activations"].colour


def fit_report(fit: Fit, command: str) -> Page:
    """Return the report of a search on one GPU."""
    first, *others = sections_of(fit_page(fit, command) if command else fit_page(fit))
    sections = [Section(REPORT["pareto"], _pareto(fit))]
    shown = fit.best or (fit.shortage.given if fit.shortage else None)
    if shown is not None:
        sections.append(Section(SECTIONS["peak"], _bill(shown.prediction.memory, fit)))
    lines = [block.text for block in first.blocks if isinstance(block, TextBlock)]
    return Page(
        title=fit.name,
        kind=REPORT["search"],
        verdict="fits" if fit.best else "does not fit",
        tone="good" if fit.best else "bad",
        answer=lines,
        figures=_figures(fit),
        sections=[section for section in [*sections, *others] if section.blocks],
    )


def across_report(across: FitAcross) -> Page:
    """Return the report of a search on several GPUs."""
    first, *others = sections_of(gpus_fit_page(across))
    found = {each.gpu.name: each.fit.best for each in across.options if each.fit.best is not None}
    charts: list[Block] = []
    if found:
        rows = {name: best.prediction.memory.components for name, best in found.items()}
        charts.append(component_bars("memory", rows, REPORT["across_memory"]))
        rates = [best.samples_per_second for best in found.values()]
        series = [{"name": REPORT["throughput"], "colour": THROUGHPUT, "values": rates}]
        charts.append(bars("speed", list(found), series, REPORT["across_speed"], unit="rate", axis=AXES["throughput"]))
    count = many(len(across.options), "GPU")
    return Page(
        title=across.name,
        kind=REPORT["search"],
        verdict="fits" if found else "does not fit",
        tone="good" if found else "bad",
        answer=[f"It fits on {len(found)} of {count}."],
        sections=[Section(REPORT["gpus"], (*charts, *first.blocks)), *others],
    )


def shortage_report(shortage: Shortage) -> Page:
    """Return the report of a training that does not fit, with what would make it fit."""
    first, *others = sections_of(shortage_page(shortage))
    prediction = shortage.given.prediction
    limits = [(prediction.gpu.name, prediction.gpu.memory_bytes)]
    chart = component_bars("bill", {"": prediction.memory.components}, memory_summary(prediction.memory), limits)
    does = "fits" if shortage.given.fits else "does not fit"
    lines = [block.text.removeprefix(does).strip() for block in first.blocks if isinstance(block, TextBlock)]
    return Page(
        title=prediction.name,
        kind=REPORT["shortage"],
        verdict=does,
        tone="good" if shortage.given.fits else "bad",
        answer=lines,
        sections=[Section(SECTIONS["peak"], (chart,)), *others],
    )


def _bill(memory: Memory, fit: Fit) -> tuple[Block, ...]:
    limits = [(fit.gpu.name, fit.gpu.memory_bytes)]
    return (component_bars("bill", {"": memory.components}, memory_summary(memory), limits), bill_table(memory))


def _pareto(fit: Fit) -> tuple[Block, ...]:
    """Return every executed candidate by memory and throughput, and the front of those that none beats."""
    tied = [each.workload for each in fit.ties]
    groups: dict[str, list[Candidate]] = {"best": [], "tie": [], "fits": [], "too_large": list(fit.too_large)}
    for each in fit.candidates:
        kind = "best" if fit.best is not None and each.workload == fit.best.workload else "fits"
        groups["tie" if kind == "fits" and each.workload in tied else kind].append(each)
    colours = {"best": _BEST, "tie": HIGHLIGHT, "fits": THROUGHPUT, "too_large": ALARM}
    series = [
        {"name": FIT_MARKS[kind], "colour": colours[kind], "points": _points(some, 16 if kind == "best" else 9)}
        for kind, some in groups.items()
        if some
    ]
    if not series:
        return ()
    front = [[each.device_bytes, each.samples_per_second] for each in fit.front]
    rates = [each.samples_per_second for each in (*fit.candidates, *fit.too_large)]
    most = max(each.device_bytes for each in (*fit.candidates, *fit.too_large))
    lines: list[dict[str, object]] = [{"name": FIT_MARKS["front"], "colour": MUTED, "points": front}]
    if fit.usable_bytes <= _FAR * most:
        limit = [[fit.usable_bytes, 0], [fit.usable_bytes, max(rates) * 1.05]]
        lines.append({"name": REPORT["usable"].format(human_bytes(fit.usable_bytes)), "colour": ALARM, "points": limit})
    axes = (
        {"title": REPORT["device"], "unit": "bytes", "log": False},
        {"title": AXES["throughput"], "unit": "rate", "log": False},
    )
    count = many(len(fit.candidates) + len(fit.too_large), "candidate")
    return (scatter("pareto", series, lines, axes, REPORT["pareto_summary"].format(count)),)


def _points(candidates: Sequence[Candidate], size: int) -> list[dict[str, object]]:
    return [
        {
            "x": each.device_bytes,
            "y": each.samples_per_second,
            "size": size,
            "label": settings_of(each),
            "text": [
                human_bytes(each.device_bytes),
                f"{rate(each.samples_per_second)} samples/s, {seconds(each.step_seconds)} per step",
            ],
        }
        for each in candidates
    ]


def _figures(fit: Fit) -> list[KeyFigure]:
    executed = (
        f"{fit.counts.executed:,} of {many(fit.counts.space, 'candidate')} executed in {seconds(fit.counts.seconds)}"
    )
    searched = KeyFigure(REPORT["searched"], f"{fit.counts.space:,}", executed)
    if fit.best is None:
        return [searched]
    best, usable = fit.best, f"{human_bytes(fit.usable_bytes)} usable on {fit.gpu.name}"
    return [
        KeyFigure(REPORT["throughput"], f"{rate(best.samples_per_second)} samples/s", settings_of(best)),
        KeyFigure(
            REPORT["device"],
            human_bytes(best.device_bytes),
            usable,
        ),
        KeyFigure(REPORT["step_time"], seconds(best.step_seconds), f"{fit.effective_batch_size} samples per step"),
        searched,
    ]
