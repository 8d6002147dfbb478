"""Tables of a search: changes, runners-up, prices, batch sizes and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import settings
from trainatomy.reporters.labels import VERDICT_STYLES
from trainatomy.reporters.search_labels import REMEDIES
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, bullets, grid
from trainatomy.results.fit import Candidate, Change, Price, Remedy
from trainatomy.units import difference, human_bytes, percent, rate, signed_percent

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
