"""The outcome of a search for settings that fit: the answer, what else was close, what changes cost, ready settings.

Tables of a search: changes, runners-up, prices, batch sizes and remedies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import search_sentences, sentences, settings
from trainatomy.reporters.export import command_line_flags, launch_command, training_arguments_code, workload_yaml
from trainatomy.reporters.labels import SECTIONS, VERDICT_STYLES
from trainatomy.reporters.settings import REMEDIES
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.gpus import gpus_fit_page, gpus_for_page
from trainatomy.reporters.text.memory import Breakdown
from trainatomy.reporters.text.prediction import subject_lines
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, bullets, grid, section
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import Candidate, Change, Fit, Price, Remedy, Shortage
from trainatomy.results.prediction import Plan
from trainatomy.units import difference, human_bytes, many, percent, rate, seconds, signed_percent

RUNNERS_UP = 5
REMEDIES_SHOWN = 6
"""Remedies of each kind."""

_NAMES = 30


def changes_table(workload: Mapping[str, object], changes: Sequence[Change]) -> Table:
    """Return each change with the keys that it sets, and what it may change in what is learnt."""
    table = grid("left", "left")
    for change in changes:
        keys = settings.changed_keys(workload, change)
        if not keys:
            continue
        cell = Text("\n".join(keys))
        if change.permission:
            cell.append(f"\n{settings.may_change(change)}", style="yellow")
        table.add_row(settings.option(change), cell)
    return table


def runners_up_table(others: Sequence[Candidate], best: Candidate, ties: Sequence[Candidate]) -> AdaptiveTable:
    """Return the fastest of the other candidates, with what differs from the best one."""
    with_tokens = settings.differ_in_length((*others[:RUNNERS_UP], best))
    columns = [Column("\nmemory"), Column("tokens/s" if with_tokens else "samples/s"), Column("vs.\nbest")]
    table = AdaptiveTable("\nwhat differs", [*columns, Column("", justify="left")], name_width=_NAMES)
    tied = [each.workload for each in ties]
    for each in others[:RUNNERS_UP]:
        pace = (each.prediction.time.tokens_per_second if each.prediction.time else None) if with_tokens else None
        table.add_row(
            settings.differences(each, best),
            human_bytes(each.device_bytes),
            rate(each.samples_per_second if pace is None else pace),
            _share(settings.speed(each, best) - 1),
            "tie" if each.workload in tied else "",
        )
    return table


def prices_table(prices: Sequence[Price]) -> list[RenderableType]:
    """Return what every change costs or saves, then what the changes that need permission may change."""
    columns = (Column("memory"), Column("step time"), Column("", justify="left"))
    table = AdaptiveTable("change", columns, name_width=_NAMES)
    for price in prices:
        time = _share(price.step_seconds) if price.candidate else "-"
        memory = difference(price.device_bytes) if price.candidate else "-"
        table.add_row(settings.option(price.change), memory, time, _price_marks(price))
    errors = {settings.option(each.change): each.error for each in prices if not each.candidate}
    failed = [f"{name}: not predicted: {(error.splitlines() or [''])[0]}" for name, error in errors.items()]
    parts: list[RenderableType] = [table]
    if failed:
        parts += [Text(), bullets(failed)]
    return [*parts, *_explained(price.change for price in prices)]


def _price_marks(price: Price) -> Text:
    """Return whether a change fits, and what it needs."""
    marks = Text()
    if price.candidate is None:
        marks.append("not predicted", style="dim")
    elif not price.candidate.fits:
        marks.append("does not fit", style=VERDICT_STYLES["does not fit"])
    if price.change.axis == "sequence_length" and price.candidate is not None:
        marks.append("\n" * bool(marks.plain) + "time per token", style="dim")
    if not price.allowed and price.change.permission:
        marks.append("\n" * bool(marks.plain) + f"needs --allow {price.change.permission}", style="yellow")
    return marks


def batches_table(rows: Sequence[Candidate], best: Candidate) -> AdaptiveTable:
    """Return the batch sizes that were executed, with all other settings as in the best candidate."""
    columns = (Column("memory"), Column("samples/s"), Column("vs. best"), Column("", justify="left"))
    table = AdaptiveTable("batch size", columns, name_width=_NAMES)
    for each in rows:
        verdict = "fits" if each.fits else "does not fit"
        mark = Text("best", style="bold") if each is best else Text("" if each.fits else verdict)
        mark.stylize("" if each.fits else VERDICT_STYLES[verdict])
        speed = "" if each is best else _share(settings.speed(each, best) - 1)
        pace = rate(each.samples_per_second)
        table.add_row(settings.batch(each), human_bytes(each.device_bytes), pace, speed, mark)
    return table


def by_gpus_table(rows: Sequence[Candidate], best: Candidate) -> AdaptiveTable:
    """Return the best settings on each number of GPUs, with the throughput of all of them and of each."""
    columns = [Column("batch ×\nsteps", 3), Column("\nmemory", 2), Column("samples/s\nin total")]
    columns += [Column("samples/s\nper GPU"), Column("\nscaling", 1), Column("", justify="left")]
    table = AdaptiveTable("\nsettings", columns, name_width=_NAMES)
    base = next((_per_gpu(each) for each in rows if each.fits), None)
    for each in rows:
        verdict = "fits" if each.fits else "does not fit"
        mark = Text("best", style="bold") if each.workload == best.workload else Text("" if each.fits else verdict)
        mark.stylize("" if each.fits else VERDICT_STYLES[verdict])
        paces = [rate(each.samples_per_second), rate(_per_gpu(each))] if each.fits else ["", ""]
        share = percent(_per_gpu(each) / base, 1, 0) if each.fits and base else ""
        batch = f"{each.per_device_train_batch_size} × {each.gradient_accumulation_steps}"
        table.add_row(settings.by_gpus(each), batch, human_bytes(each.device_bytes), *paces, share, mark)
    return table


def _per_gpu(candidate: Candidate) -> float:
    return candidate.samples_per_second / candidate.plan.world_size


def remedies_table(remedies: Sequence[Remedy]) -> list[RenderableType]:
    """Return the steps that make a training fit, by kind, then those that help and do not suffice alone."""
    groups: dict[str, list[Remedy]] = {name: [] for name in REMEDIES}
    for remedy in _without_smaller_batches(remedies):
        groups[remedy.kind if remedy.candidate.fits else "insufficient"].append(remedy)
    parts: list[RenderableType] = []
    shown: list[Remedy] = []
    for name, group in groups.items():
        if group:
            table = _remedies(group[:REMEDIES_SHOWN], first=len(shown) + 1)
            parts += [*[Text()] * bool(parts), Text(REMEDIES[name], style="italic"), table]
            shown += group[:REMEDIES_SHOWN]
    return [*parts, *_explained(change for remedy in shown for change in remedy.changes)]


def _without_smaller_batches(remedies: Sequence[Remedy]) -> list[Remedy]:
    """Return the remedies with the largest batch that fits, without smaller ones, which are slower."""
    found = [each for each in remedies if [change.axis for change in each.changes] == ["batch"]]
    largest = max(
        (each for each in found if each.candidate.fits),
        key=lambda each: each.candidate.per_device_train_batch_size,
        default=None,
    )
    return [each for each in remedies if each is largest or all(each is not one for one in found)]


def _remedies(remedies: Sequence[Remedy], first: int) -> AdaptiveTable:
    """Return a table of remedies, whose numbers begin with ``first``."""
    permissions = [
        ",".join(dict.fromkeys(change.permission for change in each.changes if change.permission)) for each in remedies
    ]
    columns = [Column("needs"), Column("change"), Column("step time"), Column("samples/s", 1)]
    columns += [Column("--allow", justify="left")] if any(permissions) else []
    table = AdaptiveTable("step", columns, name_width=_NAMES)
    for number, (remedy, permission) in enumerate(zip(remedies, permissions, strict=True), first):
        candidate = remedy.candidate
        name = settings.options(remedy.changes) or candidate.prediction.gpu.name
        time = "" if remedy.step_seconds is None else _share(remedy.step_seconds)
        memory = human_bytes(candidate.device_bytes), difference(remedy.device_bytes)
        cells: list[str | Text] = [*memory, time, rate(candidate.samples_per_second)]
        table.add_row(f"{number}. {name}", *cells, *([Text(permission, style="yellow")] if any(permissions) else []))
    return table


def _explained(changes: Iterable[Change]) -> list[RenderableType]:
    """Return what is learnt differently after the changes that need permission, below an empty line."""
    by_sentence: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        if change.permission:
            names = by_sentence.setdefault((change.permission, settings.may_change(change)), [])
            names += [settings.option(change)] * (settings.option(change) not in names)
    lines = [f"{', '.join(names)}: {sentence}" for (_, sentence), names in by_sentence.items()]
    return [Text(), bullets(lines)] if lines else []


def _share(share: float) -> str:
    """Return a relative change: ``+1.3 %``; ``+0.0 %`` for one that rounds to nothing."""
    return signed_percent(round(share, 3) or 0.0, 1, 1)


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
