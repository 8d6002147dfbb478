"""The outcome of a search for settings that fit: the answer, what else was close, what changes cost, ready settings."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from trainatomy.reporters import search_sentences, sentences, settings
from trainatomy.reporters.export import command_line_flags, launch_command, training_arguments_code, workload_yaml
from trainatomy.reporters.labels import SECTIONS, VERDICT_STYLES
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.fit_tables import (
    batches_table,
    by_gpus_table,
    changes_table,
    prices_table,
    remedies_table,
    runners_up_table,
)
from trainatomy.reporters.text.gpus import gpus_fit_page, gpus_for_page
from trainatomy.reporters.text.memory import Breakdown
from trainatomy.reporters.text.prediction import subject_lines
from trainatomy.reporters.text.rendering import bullets, section
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import Candidate, Fit, Shortage
from trainatomy.results.plan import Plan
from trainatomy.units import difference, human_bytes, many, percent, rate, seconds, signed_percent

__all__ = ["fit_page", "gpus_fit_page", "gpus_for_page", "shortage_page"]

COMMAND = "trainatomy fit ..."


def fit_page(fit: Fit, command: str = COMMAND) -> Group:
    """Return everything about a search as a page.

    Args:
        fit: The outcome.
        command: The command line of the search, to show how to measure candidates that are too close to call.
    """
    answer, *parts = _nothing_fits(fit) if fit.best is None else _fits(fit, fit.best, command)
    parts = [answer, *subject_lines(fit.predictions), *parts]
    if fit.notes:
        parts.append(section(SECTIONS["notes"], bullets([search_sentences.fit_note(note) for note in fit.notes])))
    parts.append(section(SECTIONS["fit_search"], *_search(fit)))
    if fit.best is not None:
        parts += _ready_settings(fit, fit.best)
    return Group(*parts)


def _fits(fit: Fit, best: Candidate, command: str) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(search_sentences.fit_answer(fit, best), style="bold green")]
    if faster := search_sentences.much_faster(fit.prices):
        parts.append(Text(faster, style="bold"))
    parts += _setup(fit)
    if fit.given is not None:
        parts.append(Text(_against_given(fit, fit.given, best)))
    before = fit.workload if fit.given is None else fit.given.workload
    if best.workload != before:
        parts.append(section(SECTIONS["fit_changes"], changes_table(before, best.changes)))
    if len(fit.by_gpus) > 1:
        parts.append(section(SECTIONS["fit_gpus"], by_gpus_table(fit.by_gpus, best)))
    if fit.runner_ups:
        title = SECTIONS["fit_runners_up" if fit.goal == "throughput" else "fit_others"]
        parts.append(section(title, runners_up_table(fit.runner_ups, best, fit.ties)))
    if fit.measured is not None:
        parts.append(section(SECTIONS["fit_measured"], *_measured(fit, best, fit.measured)))
    elif fit.ties:
        parts.append(section(SECTIONS["fit_ties"], *_ties(fit, best, command)))
    if fit.prices:
        parts.append(section(SECTIONS["fit_prices"], *prices_table(fit.prices)))
    rows = settings.same_but_batch((*fit.candidates, *fit.too_large), best)
    if len(rows) > 1 and fit.goal == "throughput":
        parts.append(section(SECTIONS["fit_batches"], batches_table(rows, best)))
        if advice := search_sentences.batch_advice(rows, best):
            parts.append(Padding(bullets(advice), (1, 0, 0, 2)))
    parts.append(section(SECTIONS["fit_limits"], bullets(_limits(fit))))
    return parts


def _setup(fit: Fit) -> list[RenderableType]:
    """Return what was searched for, and whether the search was stopped."""
    held = "" if fit.goal == "batch" else f", effective batch size {fit.effective_batch_size}"
    kept = f"{percent(fit.headroom, 1, 0)} of the memory is kept free"
    allowed = f"; allowed to change: {', '.join(fit.allowed)}" if fit.allowed else ""
    brackets = " In brackets: the 90 % interval." if fit.best is not None else ""
    given = Plan.of(fit.workload)
    most = "up to " * bool(fit.by_gpus) + f"{given.world_size} × " * (given.world_size > 1)
    setup = f"{fit.name} on {most}{fit.gpu.name}{held}; {kept}{allowed}.{brackets}"
    parts: list[RenderableType] = [Text(setup, style="dim")]
    if fit.interrupted:
        remaining = many(fit.counts.unexplored, "candidate")
        text = f"The search was interrupted: this is the best so far; {remaining} were not looked at."
        parts.append(Text(text, style="bold yellow"))
    return parts


def _against_given(fit: Fit, given: Candidate, best: Candidate) -> str:
    """Return how the best settings compare with the workload as it was given."""
    if given.workload == best.workload:
        steps = settings.setting(fit.workload, "train.gradient_accumulation_steps") or 1
        if given.gradient_accumulation_steps == steps:
            return "This is the workload as given."
        return "This is the workload as given, with as many accumulation steps as the effective batch size needs."
    what = f"As given ({settings.settings_of(given)})"
    if not given.fits:
        return f"{what}, it needs {human_bytes(given.device_bytes)} and does not fit."
    faster = signed_percent(settings.speed(best, given) - 1, 1, 0)
    more = difference(best.device_bytes - given.device_bytes)
    figures = f"{rate(given.samples_per_second)} samples/s, {human_bytes(given.device_bytes)}"
    return f"{what}: {figures}. The change: {faster} samples/s, {more}."


def _ties(fit: Fit, best: Candidate, command: str) -> list[RenderableType]:
    """Return which candidates may be as fast as the best one, and the command that measures them."""
    tied = [each.workload for each in fit.ties]
    number = max((rank for rank, each in enumerate(fit.runner_ups, 2) if each.workload in tied), default=len(tied) + 1)
    names = [settings.differences(each, best) for each in fit.ties]
    return [
        Text("These may be equally fast: the differences are smaller than the error of predicted differences."),
        bullets(names),
        Text("To decide, measure them on the GPU:"),
        Text(f"{command} --measure {number}", style="bold"),
    ]


def _measured(fit: Fit, best: Candidate, measured: Comparison) -> list[RenderableType]:
    """Return predicted beside measured figures, with what differs from the best candidate as names of the rows."""
    names = {each.name: settings.differences(each, best) for each in fit.runner_ups} | {best.name: "best"}
    rows = tuple(replace(row, name=names.get(row.name, row.name)) for row in measured.rows)
    named = replace(measured, rows=rows)
    throughputs = bullets([text for row in rows if (text := search_sentences.measured_throughput(row))])
    return [Text(search_sentences.measured_order(named)), throughputs, Text(), comparison_page(named)]


def _limits(fit: Fit) -> list[str]:
    """Return the GPU's limit, and the largest value or the nearest setting that does not fit."""
    total = fit.gpu.memory_bytes
    kept = f"{human_bytes(total - fit.usable_bytes)} are kept free"
    lines = [f"{fit.gpu.name} has {human_bytes(total)}; {kept}, {human_bytes(fit.usable_bytes)} are usable."]
    if fit.maximum is not None:
        lines.append(search_sentences.maximum(fit.maximum))
    elif fit.too_large:
        nearest = fit.too_large[0]
        needed = f"needs {human_bytes(nearest.device_bytes)}"
        name = settings.settings_of(nearest)
        lines.append(f"The smallest setting that was executed and does not fit {needed}: {name}.")
    return lines


def _nothing_fits(fit: Fit) -> list[RenderableType]:
    """Return by how much the training does not fit, what holds the memory, and what would make it fit."""
    shortage = fit.shortage
    if shortage is None and fit.too_large:
        shortage = Shortage(fit.too_large[0], fit.usable_bytes, fit.headroom, ())
    if shortage is None:
        return [Text(f"No setting was found that fits on {fit.gpu.name}.", style="bold red"), *_setup(fit)]
    answer = f"Nothing fits on {fit.gpu.name}: the smallest setting {search_sentences.shortage(shortage)}."
    parts: list[RenderableType] = [Text(answer, style="bold red"), *_setup(fit)]
    parts.append(Text(f"The smallest setting: {settings.settings_of(shortage.given)}."))
    if fit.given is not None and fit.given.workload != shortage.given.workload:
        needed = human_bytes(fit.given.device_bytes)
        parts.append(Text(f"As given ({settings.settings_of(fit.given)}), it needs {needed}."))
    return [*parts, *_shortage(shortage)]


def _shortage(shortage: Shortage) -> list[RenderableType]:
    """Return what holds the memory, and what would make the training fit."""
    parts: list[RenderableType] = [section(SECTIONS["fit_memory"], Breakdown(shortage.given.prediction.memory))]
    if shortage.remedies:
        parts.append(section(SECTIONS["fit_remedies"], *remedies_table(shortage.remedies)))
    return parts


def shortage_page(shortage: Shortage) -> Group:
    """Return what a training needs that does not fit, and what would make it fit."""
    prediction = shortage.given.prediction
    does = "fits" if shortage.given.fits else "does not fit"
    verdict = Text(does, style=VERDICT_STYLES[does])
    answer = Text.assemble(
        verdict, f" on {prediction.gpu.name}: {prediction.name} {search_sentences.shortage(shortage)}."
    )
    kept = f"{percent(shortage.headroom, 1, 0)} of the memory is kept free; {settings.settings_of(shortage.given)}."
    parts: list[RenderableType] = [answer, *subject_lines([prediction]), Text(kept, style="dim")]
    if prediction.out_of_memory is not None:
        parts.append(Text(sentences.out_of_memory(prediction.out_of_memory, predicted=True)))
    if shortage.interrupted:
        parts.append(Text("The search was interrupted: these are the steps found so far.", style="bold yellow"))
    parts += _shortage(shortage)
    taken = f"Searched in {seconds(shortage.seconds)} without a GPU ({sentences.versions(prediction)})."
    return Group(*parts, Text(), Text(taken, style="dim"))


def _search(fit: Fit) -> list[RenderableType]:
    """Return how many candidates there were, how each was dealt with, and how long that took."""
    versions = next((sentences.versions(each.prediction) for each in (*fit.candidates, *fit.too_large)), "")
    lines = search_sentences.search_counts(fit.counts, versions, with_remedies=fit.shortage is not None)
    return [Text(lines[0]), bullets(lines[1:])] if len(lines) > 1 else [Text(lines[0])]


def _ready_settings(fit: Fit, best: Candidate) -> list[RenderableType]:
    """Return the settings as Python, as a workload file and as options; not indented, so that they can be pasted."""
    texts = {
        "fit_python": training_arguments_code(best, fit.name),
        **({"fit_launch": launch_command(best)} if best.plan.world_size > 1 else {}),
        "fit_yaml": workload_yaml(best),
        "fit_flags": command_line_flags(best),
    }
    parts: list[RenderableType] = []
    for name, text in texts.items():
        parts += [Text(), Text(SECTIONS[name], style="bold"), Text(), Text(text.rstrip("\n"))]
    return parts
