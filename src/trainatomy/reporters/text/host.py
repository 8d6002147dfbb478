"""The host's bill as a section: its phases, the components of the fullest one, and a measurement beside them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from trainatomy.reporters import host_sentences
from trainatomy.reporters.document import Bullets, Cell, Column, Document, Part, Section, Table, grid, section, words
from trainatomy.reporters.labels import COLUMNS, VERDICT_STYLES
from trainatomy.results.host import HostBill, HostPhase
from trainatomy.units import human_bytes, signed_percent

_COLUMNS = (
    words(),
    Column("needed"),
    Column("with files"),
    Column("fullest\nprocess"),
    Column("pinned", rank=1),
    Column("/dev/shm", rank=2),
    Column("disk", rank=3),
)


def host_page(bill: HostBill) -> Document:
    """Return a bill as a page of its own."""
    return Document((host_section(bill),))


def host_section(bill: HostBill, measured: HostBill | None = None) -> Section:
    """Return a bill, predicted or measured, as a section; of a predicted one, with what was measured beside it."""
    return section(host_sentences.TITLE, *_blocks(bill, measured))


def is_shown(bill: HostBill) -> bool:
    """Return whether a prediction's page shows the bill: a limit is known, or the training keeps tensors there."""
    kept = {part.component for phase in bill.phases for process in phase.processes for part in process.parts}
    return bill.verdict is not None or bool(kept & {"activations", "offloaded", "dataset"})


def _blocks(bill: HostBill, measured: HostBill | None) -> Iterator[Part]:
    style = "" if bill.verdict is None else VERDICT_STYLES[bill.verdict]
    yield Text.assemble(*(["host: "] if bill.verdict is None else [(bill.verdict, style), ": "]), _said(bill))
    if said := list(host_sentences.shortages(bill)):
        yield Bullets(said)
    yield _phases(bill, measured)
    if components := list(_components(bill.fullest)):
        yield Text(f"At most, with {host_sentences.PHASES[bill.fullest.name]}, a process holds:", style="dim")
        yield grid(components, words(max_width=48), "right", words())
    if bill.remedies:
        yield Text("What lowers it:", style="dim")
        rows = [
            (host_sentences.remedy(each.name, each.value), human_bytes(each.needed_bytes), "fits" if each.fits else "")
            for each in bill.remedies
        ]
        yield grid(rows, words(), "right", "left")
    if bill.notes:
        yield Bullets(bill.notes)


def _said(bill: HostBill) -> str:
    return host_sentences.verdict(bill)


def _phases(bill: HostBill, measured: HostBill | None) -> Table:
    found = {} if measured is None else {phase.name: phase for phase in measured.phases}
    rows: list[tuple[Cell, ...]] = []
    for phase in bill.phases:
        name = host_sentences.PHASES[phase.name]
        if (beside := found.get(phase.name)) is None:
            rows.append((name, *_cells(phase)))
            continue
        rows.append((f"{name}, {COLUMNS['measured']}", *_cells(beside)))
        rows.append((f"  {COLUMNS['predicted']}", *_cells(phase)))
        gaps = (
            signed_percent(one - other, other, 1) if other else "-"
            for one, other in zip(_sizes(phase), _sizes(beside), strict=True)
        )
        rows.append((f"  {COLUMNS['gap']}", *gaps))
    return Table(_COLUMNS, tuple(rows), name_width=30)


def _sizes(phase: HostPhase) -> tuple[int, ...]:
    pinned = sum(each.count * each.of_kind("pinned") for each in phase.processes)
    sizes = phase.needed_bytes, phase.held_bytes, phase.fullest.resident_bytes
    return (*sizes, pinned, phase.shm_bytes, phase.disk_bytes)


def _cells(phase: HostPhase) -> Iterator[str]:
    return (human_bytes(size) if size else "-" for size in _sizes(phase))


def _components(phase: HostPhase) -> Iterator[tuple[Cell, ...]]:
    """Yield the components of a predicted phase with their size in one process, and what kind of memory they are."""
    for process in phase.processes:
        for part in process.parts:
            if not part.component or not part.bytes:
                continue
            kind = "shared with its parent" if part.inherited else host_sentences.KINDS[part.kind]
            assumed = "" if part.high_bytes is None else f"assumed; up to {human_bytes(part.high_bytes)}"
            said = ", ".join(
                each
                for each in (
                    f"in each of {host_sentences.processes(process.count, process.role)}" if process.count > 1 else "",
                    kind,
                    assumed,
                )
                if each
            )
            yield host_sentences.component_title(part.component), human_bytes(part.bytes), said
