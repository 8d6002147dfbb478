"""The outcome of a search for settings that fit: the answer, what else was close, what changes cost, ready settings.

Tables of a search: changes, runners-up, prices, batch sizes and remedies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from rich.text import Text

from trainatomy.reporters import search_sentences, sentences, settings
from trainatomy.reporters.document import (
    Bullets,
    Code,
    Column,
    Document,
    Part,
    Section,
    Table,
    grid,
    listed,
    section,
    table,
    words,
)
from trainatomy.reporters.export import command_line_flags, launch_command, training_arguments_code, workload_yaml
from trainatomy.reporters.labels import SECTIONS, VERDICT_STYLES
from trainatomy.reporters.settings import REMEDIES
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.host import host_section
from trainatomy.reporters.text.memory import breakdown
from trainatomy.reporters.text.prediction import subject_of
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import Candidate, Change, Fit, Price, Remedy, Shortage
from trainatomy.results.prediction import Plan
from trainatomy.units import difference, human_bytes, many, percent, rate, seconds, signed_percent
from trainatomy.workload.dialects.answer import Answer, answer_in, rewritten
from trainatomy.workload.dialects.translation import Origin

RUNNERS_UP = 5
REMEDIES_SHOWN = 6
"""Remedies of each kind."""

_NAMES = 30


def _changes(workload: Mapping[str, object], changes: Sequence[Change]) -> Table:
    """Return each change with the keys that it sets, and what it may change in what is learnt."""
    rows = []
    for change in changes:
        if keys := settings.changed_keys(workload, change):
            cell = Text("\n".join(keys))
            if change.permission:
                cell.append(f"\n{settings.may_change(change)}", style="yellow")
            rows.append((settings.option(change), cell))
    return grid(rows, "left", "left")


def _runners_up(fit: Fit, best: Candidate) -> Table:
    """Return the fastest of the other candidates, with what differs from the best one."""
    others = fit.runner_ups[:RUNNERS_UP]
    with_tokens = settings.differ_in_length((*others, best))
    tied = [each.workload for each in fit.ties]

    def throughput(each: Candidate) -> str:
        tokens = each.prediction.time.tokens_per_second if each.prediction.time and with_tokens else None
        return rate(each.samples_per_second if tokens is None else tokens)

    return table(
        others,
        words("\nwhat differs", lambda each: settings.differences(each, best)),
        Column("\nmemory", lambda each: human_bytes(each.device_bytes)),
        Column("tokens/s" if with_tokens else "samples/s", throughput),
        Column("vs.\nbest", lambda each: _share(settings.speed(each, best) - 1)),
        words("", lambda each: "tie" if each.workload in tied else "", wraps=False),
        name_width=_NAMES,
    )


def _prices(prices: Sequence[Price]) -> Iterator[Part]:
    """Yield what every change costs or saves, then what the changes that need permission may change."""
    yield table(
        prices,
        words("change", lambda price: settings.option(price.change)),
        Column("memory", lambda price: difference(price.device_bytes) if price.candidate else "-"),
        Column("step time", lambda price: _share(price.step_seconds) if price.candidate else "-"),
        words("", _price_marks, wraps=False),
        name_width=_NAMES,
    )
    errors = {settings.option(each.change): each.error for each in prices if not each.candidate}
    if errors:
        yield Text()
        yield Bullets([f"{name}: not predicted: {(error.splitlines() or [''])[0]}" for name, error in errors.items()])
    yield from _explained(price.change for price in prices)


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


def _mark(each: Candidate, is_best: bool) -> Text:
    """Return whether a candidate is the best one, or does not fit."""
    if is_best:
        return Text("best", style="bold")
    return Text("" if each.fits else "does not fit", style="" if each.fits else VERDICT_STYLES["does not fit"])


def _batches(rows: Sequence[Candidate], best: Candidate) -> Table:
    """Return the batch sizes that were executed, with all other settings as in the best candidate."""
    return table(
        rows,
        words("batch size", settings.batch),
        Column("memory", lambda each: human_bytes(each.device_bytes)),
        Column("samples/s", lambda each: rate(each.samples_per_second)),
        Column("vs. best", lambda each: "" if each is best else _share(settings.speed(each, best) - 1)),
        words("", lambda each: _mark(each, each is best), wraps=False),
        name_width=_NAMES,
    )


def _by_gpus(rows: Sequence[Candidate], best: Candidate) -> Table:
    """Return the best settings on each number of GPUs, with the throughput of all of them and of each."""
    base = next((_per_gpu(each) for each in rows if each.fits), None)
    return table(
        rows,
        words("\nsettings", settings.by_gpus),
        Column(
            "batch ×\nsteps",
            lambda each: f"{each.per_device_train_batch_size} × {each.gradient_accumulation_steps}",
            rank=3,
        ),
        Column("\nmemory", lambda each: human_bytes(each.device_bytes), rank=2),
        Column("samples/s\nin total", lambda each: rate(each.samples_per_second) if each.fits else ""),
        Column("samples/s\nper GPU", lambda each: rate(_per_gpu(each)) if each.fits else ""),
        Column("\nscaling", lambda each: percent(_per_gpu(each) / base, 1, 0) if each.fits and base else "", rank=1),
        words("", lambda each: _mark(each, each.workload == best.workload), wraps=False),
        name_width=_NAMES,
    )


def _per_gpu(candidate: Candidate) -> float:
    return candidate.samples_per_second / candidate.plan.world_size


def _remedies(remedies: Sequence[Remedy], shown: list[Remedy]) -> Iterator[Part]:
    """Yield the steps that make a training fit, by kind, then those that help and do not suffice alone.

    Args:
        remedies: The steps.
        shown: Gets those that are shown, in the order of their numbers.
    """
    groups: dict[str, list[Remedy]] = {name: [] for name in REMEDIES}
    for remedy in _without_smaller_batches(remedies):
        groups[remedy.kind if remedy.candidate.fits else "insufficient"].append(remedy)
    for name, group in groups.items():
        if group:
            if shown:
                yield Text()
            yield Text(REMEDIES[name], style="italic")
            yield _remedies_of_kind(group[:REMEDIES_SHOWN], first=len(shown) + 1)
            shown += group[:REMEDIES_SHOWN]
    yield from _explained(change for remedy in shown for change in remedy.changes)


def _without_smaller_batches(remedies: Sequence[Remedy]) -> list[Remedy]:
    """Return the remedies with the largest batch that fits, without smaller ones, which are slower."""
    found = [each for each in remedies if [change.axis for change in each.changes] == ["batch"]]
    largest = max(
        (each for each in found if each.candidate.fits),
        key=lambda each: each.candidate.per_device_train_batch_size,
        default=None,
    )
    return [each for each in remedies if each is largest or all(each is not one for one in found)]


def _remedies_of_kind(remedies: Sequence[Remedy], first: int) -> Table:
    """Return a table of remedies, whose numbers begin with ``first``."""
    numbers = count(first)

    def name(remedy: Remedy) -> str:
        return f"{next(numbers)}. {settings.options(remedy.changes) or remedy.candidate.prediction.gpu.name}"

    def permission(remedy: Remedy) -> str:
        return ",".join(dict.fromkeys(change.permission for change in remedy.changes if change.permission))

    return table(
        remedies,
        words("step", name),
        Column("needs", lambda each: human_bytes(each.candidate.device_bytes)),
        Column("change", lambda each: difference(each.device_bytes)),
        Column("step time", lambda each: "" if each.step_seconds is None else _share(each.step_seconds)),
        Column("samples/s", lambda each: rate(each.candidate.samples_per_second), rank=1),
        words(
            "--allow",
            lambda each: Text(permission(each), style="yellow"),
            wraps=False,
            is_shown=any(map(permission, remedies)),
        ),
        name_width=_NAMES,
    )


def _explained(changes: Iterable[Change]) -> list[Part]:
    """Return what is learnt differently after the changes that need permission, below an empty line."""
    by_sentence: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        if change.permission:
            names = by_sentence.setdefault((change.permission, settings.may_change(change)), [])
            names += [settings.option(change)] * (settings.option(change) not in names)
    lines = [f"{', '.join(names)}: {sentence}" for (_, sentence), names in by_sentence.items()]
    return [Text(), Bullets(lines)] if lines else []


def _share(share: float) -> str:
    """Return a relative change: ``+1.3 %``; ``+0.0 %`` for one that rounds to nothing."""
    return signed_percent(round(share, 3) or 0.0, 1, 1)


COMMAND = "trainatomy fit ..."


def fit_page(fit: Fit, command: str = COMMAND, origin: Origin | None = None) -> Document:
    """Return everything about a search as a page.

    Args:
        fit: The outcome.
        command: The command line of the search, to show how to measure candidates that are too close to call.
        origin: The configuration of another framework that the training was read from.
    """
    answer, *parts = _nothing_fits(fit, origin) if fit.best is None else _fits(fit, fit.best, command)
    notes = [search_sentences.fit_note(note) for note in fit.notes]
    search = section(SECTIONS["fit_search"], *_search(fit))
    ready = () if fit.best is None else _ready_settings(fit, fit.best, origin)
    return Document((answer, subject_of(fit.predictions), *parts, *listed(SECTIONS["notes"], notes), search, *ready))


def _fits(fit: Fit, best: Candidate, command: str) -> Iterator[Part]:
    yield Text(search_sentences.fit_answer(fit, best), style="bold green")
    is_priced = "compiled_is_best" not in fit.notes
    if is_priced and (faster := search_sentences.much_faster(fit.prices)):
        yield Text(faster, style="bold")
    yield from _setup(fit)
    if fit.given is not None:
        yield Text(_against_given(fit, fit.given, best))
    before = fit.workload if fit.given is None else fit.given.workload
    if best.workload != before:
        yield section(SECTIONS["fit_changes"], _changes(before, best.changes))
    if len(fit.by_gpus) > 1:
        yield section(SECTIONS["fit_gpus"], _by_gpus(fit.by_gpus, best))
    if fit.runner_ups:
        title = SECTIONS["fit_runners_up" if fit.goal == "throughput" else "fit_others"]
        yield section(title, _runners_up(fit, best))
    if fit.measured is not None:
        yield section(SECTIONS["fit_measured"], *_measured(fit, best, fit.measured))
    elif fit.ties:
        yield section(SECTIONS["fit_ties"], *_ties(fit, best, command))
    if fit.prices:
        yield section(SECTIONS["fit_prices"], *_prices(fit.prices))
    rows = settings.same_but_batch((*fit.candidates, *fit.too_large), best)
    if len(rows) > 1 and fit.goal == "throughput":
        advice = search_sentences.batch_advice(rows, best)
        lines = [Text(), Bullets(advice)] if advice else []
        yield section(SECTIONS["fit_batches"], _batches(rows, best), *lines)
    yield from host_of(best)
    yield from listed(SECTIONS["fit_limits"], _limits(fit))


def host_of(candidate: Candidate) -> Iterator[Section]:
    """Yield what the host holds, where it has too little: the search changes nothing about that."""
    bill = candidate.prediction.host_bill
    if bill is not None and bill.shortages:
        yield host_section(bill)


def _setup(fit: Fit) -> list[Part]:
    """Return what was searched for, and whether the search was stopped."""
    held = "" if fit.goal == "batch" else f", effective batch size {fit.effective_batch_size}"
    kept = f"{percent(fit.headroom, 1, 0)} of the memory is kept free"
    allowed = f"; allowed to change: {', '.join(fit.allowed)}" if fit.allowed else ""
    brackets = " In brackets: the 90 % interval." if fit.best is not None else ""
    given = Plan.of(fit.workload)
    most = "up to " * bool(fit.by_gpus) + f"{given.world_size} × " * (given.world_size > 1)
    setup = f"{fit.name} on {most}{fit.gpu.name}{held}; {kept}{allowed}.{brackets}"
    parts: list[Part] = [Text(setup, style="dim")]
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


def _ties(fit: Fit, best: Candidate, command: str) -> list[Part]:
    """Return which candidates may be as fast as the best one, and the command that measures them."""
    tied = [each.workload for each in fit.ties]
    number = max((rank for rank, each in enumerate(fit.runner_ups, 2) if each.workload in tied), default=len(tied) + 1)
    names = [settings.differences(each, best) for each in fit.ties]
    return [
        Text("These may be equally fast: the differences are smaller than the error of predicted differences."),
        Bullets(names),
        Text("To decide, measure them on the GPU:"),
        Text(f"{command} --measure {number}", style="bold"),
    ]


def _measured(fit: Fit, best: Candidate, measured: Comparison) -> list[Part]:
    """Return predicted beside measured figures, with what differs from the best candidate as names of the rows."""
    names = {each.name: settings.differences(each, best) for each in fit.runner_ups} | {best.name: "best"}
    rows = tuple(replace(row, name=names.get(row.name, row.name)) for row in measured.rows)
    named = replace(measured, rows=rows)
    throughputs = Bullets([text for row in rows if (text := search_sentences.measured_throughput(row))])
    return [Text(search_sentences.measured_order(named)), throughputs, Text(), comparison_page(named)]


def _limits(fit: Fit) -> list[str]:
    """Return the GPU's limit, and the largest value or the nearest setting that does not fit."""
    total = fit.gpu.memory_bytes
    kept = f"{human_bytes(total - fit.usable_bytes)} are kept free"
    lines = [f"{fit.gpu.name} has {human_bytes(total)}; {kept}, {human_bytes(fit.usable_bytes)} are usable."]
    if fit.maximum is not None:
        lines += [search_sentences.maximum(fit.maximum), *search_sentences.passed_over(fit.maximum)]
    elif fit.too_large:
        nearest = fit.too_large[0]
        needed = f"needs {human_bytes(nearest.device_bytes)}"
        name = settings.settings_of(nearest)
        lines.append(f"The smallest setting that was executed and does not fit {needed}: {name}.")
    return lines


def _nothing_fits(fit: Fit, origin: Origin | None) -> Iterator[Part]:
    """Yield by how much the training does not fit, what holds the memory, and what would make it fit."""
    shortage = fit.shortage
    if shortage is None and fit.too_large:
        shortage = Shortage(fit.too_large[0], fit.usable_bytes, fit.headroom, ())
    if shortage is None:
        yield Text(f"No setting was found that fits on {fit.gpu.name}.", style="bold red")
        yield from _setup(fit)
        return
    yield Text(search_sentences.nothing_fits(shortage), style="bold red")
    yield from _setup(fit)
    yield Text(f"The smallest setting: {settings.settings_of(shortage.given)}.")
    if fit.given is not None and fit.given.workload != shortage.given.workload:
        needed = human_bytes(fit.given.device_bytes)
        yield Text(f"As given ({settings.settings_of(fit.given)}), it needs {needed}.")
    yield from _shortage(shortage, origin, fit.workload)


def _shortage(shortage: Shortage, origin: Origin | None, before: Mapping[str, object]) -> Iterator[Part]:
    """Yield what holds the memory, and what would make the training fit."""
    yield section(SECTIONS["fit_memory"], breakdown(shortage.given.prediction.memory))
    if shortage.remedies:
        shown = list[Remedy]()
        yield section(SECTIONS["fit_remedies"], *_remedies(shortage.remedies, shown))
        if origin is not None:
            said = [_in_dialect(origin, before, remedy.candidate.workload) for remedy in shown]
            lines = [f"{number}. {keys}" for number, keys in enumerate(said, start=1) if keys]
            yield section(f"The same in {origin.source}", *map(Text, lines))


def _in_dialect(origin: Origin, before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return what to change in a configuration, on one line."""
    change = answer_in(origin, before, after)
    return "; ".join([*change.lines(), *_unsaid(origin, change)])


def _unsaid(origin: Origin, change: Answer) -> list[str]:
    lacking = [f"{origin.name} has no key for {key}: {value}" for key, value in change.unsaid.items()]
    return [*change.outside, *lacking]


def shortage_page(shortage: Shortage, origin: Origin | None = None) -> Document:
    """Return what a training needs that does not fit, and what would make it fit.

    Args:
        shortage: The outcome of a search for remedies.
        origin: The configuration of another framework that the training was read from.
    """
    return Document(tuple(_shortage_parts(shortage, origin)))


def _shortage_parts(shortage: Shortage, origin: Origin | None) -> Iterator[Part]:
    prediction = shortage.given.prediction
    does = "fits" if shortage.given.fits else "does not fit"
    verdict = Text(does, style=VERDICT_STYLES[does])
    yield Text.assemble(verdict, f" on {prediction.gpu.name}: {prediction.name} {search_sentences.shortage(shortage)}.")
    yield subject_of([prediction])
    kept = f"{percent(shortage.headroom, 1, 0)} of the memory is kept free; {settings.settings_of(shortage.given)}."
    yield Text(kept, style="dim")
    if prediction.out_of_memory is not None:
        yield Text(sentences.out_of_memory(prediction.out_of_memory, predicted=True))
    if shortage.interrupted:
        yield Text("The search was interrupted: these are the steps found so far.", style="bold yellow")
    yield from _shortage(shortage, origin, shortage.given.workload)
    yield from host_of(shortage.given)
    yield Text()
    taken = f"Searched in {seconds(shortage.seconds)} without a GPU ({sentences.versions(prediction)})."
    yield Text(taken, style="dim")


def _search(fit: Fit) -> list[Part]:
    """Return how many candidates there were, how each was dealt with, and how long that took."""
    versions = next((sentences.versions(each.prediction) for each in (*fit.candidates, *fit.too_large)), "")
    lines = search_sentences.search_counts(fit.counts, versions, with_remedies=fit.shortage is not None)
    return [Text(lines[0]), Bullets(lines[1:])] if len(lines) > 1 else [Text(lines[0])]


def _ready_settings(fit: Fit, best: Candidate, origin: Origin | None) -> Iterator[Part]:
    """Yield the settings in the user's own configuration, or as Python, a workload file and options.

    They are not indented, so that they can be pasted.
    """
    if origin is not None:
        change = answer_in(origin, fit.workload, best.workload)
        title = f"{'The command' if origin.is_command else 'Changed keys'} of {origin.name}"
        text = rewritten(origin, change) if origin.is_command else "\n".join(change.lines())
        yield section(title, Code(text or "# nothing changes"), *map(Text, _unsaid(origin, change)), indent=0)
        return
    yield section(SECTIONS["fit_python"], Code(training_arguments_code(best, fit.name)), indent=0)
    if best.plan.world_size > 1:
        yield section(SECTIONS["fit_launch"], Code(launch_command(best)), indent=0)
    yield section(SECTIONS["fit_yaml"], Code(workload_yaml(best)), indent=0)
    yield section(SECTIONS["fit_flags"], Code(command_line_flags(best)), indent=0)
