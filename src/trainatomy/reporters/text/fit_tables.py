"""Tables of a search: changes, runners-up, prices, batch sizes and remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import settings
from trainatomy.reporters.labels import PERMISSIONS, REMEDIES, VERDICT_STYLES
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, bullets, grid
from trainatomy.results.fit import Candidate, Change, Price, Remedy
from trainatomy.units import difference, human_bytes, rate, signed_percent

RUNNERS_UP = 5
REMEDIES_SHOWN, HELPFUL_SHOWN = 10, 6
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
            signed_percent(settings.speed(each, best) - 1, 1, 1),
            "tie" if each.workload in tied else "",
        )
    return table


def prices_table(prices: Sequence[Price]) -> list[RenderableType]:
    """Return what every change costs or saves, then what the changes that need permission may change."""
    columns = (Column("memory"), Column("step time"), Column("", justify="left"))
    table = AdaptiveTable("change", columns, name_width=_NAMES)
    for price in prices:
        time = signed_percent(price.step_seconds, 1, 1) if price.candidate else "-"
        memory = difference(price.device_bytes) if price.candidate else "-"
        table.add_row(settings.option(price.change), memory, time, _price_marks(price))
    parts: list[RenderableType] = [table]
    reasons = [f"{settings.option(each.change)}: not predicted: {each.error}" for each in prices if not each.candidate]
    permissions = dict.fromkeys(each.change.permission for each in prices if each.change.permission)
    reasons += [f"{name}: {PERMISSIONS.get(name, '')}" for name in permissions]
    return [*parts, Text(), bullets(reasons)] if reasons else parts


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
        speed = "" if each is best else signed_percent(settings.speed(each, best) - 1, 1, 1)
        pace = rate(each.samples_per_second)
        table.add_row(settings.batch(each), human_bytes(each.device_bytes), pace, speed, mark)
    return table


def remedies_table(remedies: Sequence[Remedy]) -> list[RenderableType]:
    """Return the steps that make a training fit, in order, then those that help and do not suffice alone."""
    sufficient = [remedy for remedy in remedies if remedy.candidate.fits]
    helpful = [remedy for remedy in remedies if not remedy.candidate.fits]
    parts: list[RenderableType] = [_remedies(sufficient[:REMEDIES_SHOWN])] if sufficient else []
    if helpful:
        parts += [Text()] * bool(sufficient)
        parts += [Text("These help, but do not suffice alone:"), _remedies(helpful[:HELPFUL_SHOWN])]
    changes = [change for remedy in remedies for change in remedy.changes if change.permission]
    reasons = dict.fromkeys(f"{each.permission}: {settings.may_change(each)}" for each in changes)
    return [*parts, Text(), bullets(list(reasons))] if reasons else parts


def _remedies(remedies: Sequence[Remedy]) -> AdaptiveTable:
    numbers = (Column("needs"), Column("change"), Column("step time"), Column("samples/s", 1))
    table = AdaptiveTable("step", (*numbers, Column("", justify="left")), name_width=_NAMES)
    for number, remedy in enumerate(remedies, 1):
        candidate = remedy.candidate
        name = settings.options(remedy.changes) or candidate.prediction.gpu.name
        time = "" if remedy.step_seconds is None else signed_percent(remedy.step_seconds, 1, 0)
        memory = human_bytes(candidate.device_bytes), difference(remedy.device_bytes)
        pace = rate(candidate.samples_per_second)
        table.add_row(f"{number}. {name}", *memory, time, pace, _remedy_marks(remedy))
    return table


def _remedy_marks(remedy: Remedy) -> Text:
    permissions = dict.fromkeys(change.permission for change in remedy.changes if change.permission)
    if permissions:
        return Text(f"--allow {','.join(permissions)}", style="yellow")
    return Text(REMEDIES.get(remedy.kind, remedy.kind))
