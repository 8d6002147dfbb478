"""The outcome of a search for settings that fit: the answer, what else was close, what changes cost, ready settings."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from trainatomy.reporters import sentences, settings
from trainatomy.reporters.export import command_line_flags, training_arguments_code, workload_yaml
from trainatomy.reporters.labels import SECTIONS
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.fit_tables import (
    batches_table,
    changes_table,
    prices_table,
    remedies_table,
    runners_up_table,
)
from trainatomy.reporters.text.gpus import gpus_fit_page, gpus_for_page
from trainatomy.reporters.text.memory import Breakdown
from trainatomy.reporters.text.rendering import bullets, section
from trainatomy.results.fit import Candidate, Fit
from trainatomy.units import difference, human_bytes, many, percent, rate, signed_percent

__all__ = ["fit_page", "gpus_fit_page", "gpus_for_page"]

COMMAND = "trainatomy fit ..."


def fit_page(fit: Fit, command: str = COMMAND) -> Group:
    """Return everything about a search as a page.

    Args:
        fit: The outcome.
        command: The command line of the search, to show how to measure candidates that are too close to call.
    """
    parts = _nothing_fits(fit) if fit.best is None else _fits(fit, fit.best, command)
    if fit.notes:
        parts.append(section(SECTIONS["notes"], bullets([sentences.fit_note(note) for note in fit.notes])))
    parts.append(section(SECTIONS["fit_search"], *_search(fit)))
    if fit.best is not None:
        parts += _ready_settings(fit, fit.best)
    return Group(*parts)


def _fits(fit: Fit, best: Candidate, command: str) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(sentences.fit_answer(fit, best), style="bold green"), *_setup(fit)]
    parts.append(Text(_against_given(fit, best)))
    if best.changes:
        parts.append(section(SECTIONS["fit_changes"], changes_table(fit.workload, best.changes)))
    if others := [each for each in fit.candidates if each.workload != best.workload]:
        parts.append(section(SECTIONS["fit_runners_up"], runners_up_table(others, best, fit.ties)))
    if fit.measured is not None:
        body: list[RenderableType] = [
            Text(sentences.measured_order(fit.measured)),
            Text(),
            comparison_page(fit.measured),
        ]
        parts.append(section(SECTIONS["fit_measured"], *body))
    elif fit.ties:
        parts.append(section(SECTIONS["fit_ties"], *_ties(fit, best, command)))
    if fit.prices:
        parts.append(section(SECTIONS["fit_prices"], *prices_table(fit.prices)))
    rows = settings.same_but_batch((*fit.candidates, *fit.too_large), best)
    if len(rows) > 1:
        advice = sentences.batch_advice(rows, best)
        parts.append(section(SECTIONS["fit_batches"], batches_table(rows, best), Text(), bullets(advice)))
    parts.append(section(SECTIONS["fit_limits"], bullets(_limits(fit))))
    return parts


def _setup(fit: Fit) -> list[RenderableType]:
    """Return what was searched for, and whether the search was stopped."""
    held = f"effective batch size {fit.effective_batch_size}"
    kept = f"{percent(fit.headroom, 1, 0)} of the memory is kept free"
    allowed = f"; allowed to change: {', '.join(fit.allowed)}" if fit.allowed else ""
    parts: list[RenderableType] = [Text(f"{fit.name} on {fit.gpu.name}, {held}; {kept}{allowed}.", style="dim")]
    if fit.interrupted:
        remaining = many(fit.counts.unexplored, "candidate")
        text = f"The search was interrupted: this is the best so far; {remaining} were not looked at."
        parts.append(Text(text, style="bold yellow"))
    return parts


def _against_given(fit: Fit, best: Candidate) -> str:
    """Return how the best settings compare with the workload as it was given."""
    given = fit.given
    if given is None:
        return "The workload as given could not be predicted."
    if given.workload == best.workload:
        return "This is the workload as given."
    what = f"As given ({settings.settings_of(given)})"
    if not given.fits:
        return f"{what}, it needs {human_bytes(given.device_bytes)} and does not fit."
    faster = signed_percent(settings.speed(best, given) - 1, 1, 0)
    more = difference(best.device_bytes - given.device_bytes)
    figures = f"{rate(given.samples_per_second)} samples/s, {human_bytes(given.device_bytes)}"
    return f"{what}: {figures}. The change: {faster} samples/s, {more}."


def _ties(fit: Fit, best: Candidate, command: str) -> list[RenderableType]:
    """Return which candidates may be as fast as the best one, and the command that measures them."""
    workloads = [each.workload for each in fit.ties]
    ranks = [rank for rank, each in enumerate(fit.candidates, 1) if each.workload in workloads]
    number = max([len(fit.ties) + 1, *ranks])
    names = [settings.differences(each, best) for each in fit.ties]
    return [
        Text("These may be as fast: the times differ by less than the error that such differences have."),
        bullets(names),
        Text("To decide, measure them on the GPU:"),
        Text(f"{command} --measure {number}", style="bold"),
    ]


def _limits(fit: Fit) -> list[str]:
    """Return the GPU's limit, and the largest value or the nearest setting that does not fit."""
    total = fit.gpu.memory_bytes
    kept = f"{human_bytes(total - fit.usable_bytes)} are kept free"
    lines = [f"{fit.gpu.name} has {human_bytes(total)}; {kept}, {human_bytes(fit.usable_bytes)} are usable."]
    if fit.maximum is not None:
        lines.append(sentences.maximum(fit.maximum))
    elif fit.too_large:
        nearest = fit.too_large[0]
        needed = f"needs {human_bytes(nearest.device_bytes)}"
        lines.append(f"The smallest setting that was executed and does not fit {needed}: {_name(nearest)}.")
    return lines


def _name(candidate: Candidate) -> str:
    return settings.settings_of(candidate)


def _nothing_fits(fit: Fit) -> list[RenderableType]:
    """Return by how much the training does not fit, what holds the memory, and what would make it fit."""
    if not fit.too_large:
        return [Text(f"No setting was found that fits on {fit.gpu.name}.", style="bold red"), *_setup(fit)]
    smallest = fit.too_large[0]
    missing = human_bytes(smallest.device_bytes - fit.usable_bytes)
    usable = f"the {human_bytes(fit.usable_bytes)} that may be used"
    answer = f"Nothing fits on {fit.gpu.name}: the smallest setting needs {human_bytes(smallest.device_bytes)}, "
    if smallest.device_bytes > fit.usable_bytes:
        answer += f"{missing} more than {usable}"
    else:
        answer += f"and fails because of fragmentation although {usable} would suffice"
    parts: list[RenderableType] = [Text(f"{answer}.", style="bold red"), *_setup(fit)]
    parts.append(Text(f"The smallest setting: {_name(smallest)}."))
    parts.append(section(SECTIONS["fit_memory"], Breakdown(smallest.prediction.memory)))
    if fit.remedies:
        parts.append(section(SECTIONS["fit_remedies"], *remedies_table(fit.remedies)))
    return parts


def _search(fit: Fit) -> list[RenderableType]:
    """Return how many candidates there were, how each was dealt with, and how long that took."""
    versions = next((sentences.versions(each.prediction) for each in (*fit.candidates, *fit.too_large)), "")
    lines = sentences.search_counts(fit.counts, versions)
    return [Text(lines[0]), bullets(lines[1:])] if len(lines) > 1 else [Text(lines[0])]


def _ready_settings(fit: Fit, best: Candidate) -> list[RenderableType]:
    """Return the settings as Python, as a workload file and as options; not indented, so that they can be pasted."""
    texts = {
        "fit_python": training_arguments_code(best, fit.name),
        "fit_yaml": workload_yaml(best),
        "fit_flags": command_line_flags(best),
    }
    parts: list[RenderableType] = []
    for name, text in texts.items():
        parts += [Text(), Text(SECTIONS[name], style="bold"), Text(), Text(text.rstrip("\n"))]
    return parts
