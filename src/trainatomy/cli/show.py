"""``trainatomy show``: show a measured run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainatomy.cli.options import DEBUG, JSON, command
from trainatomy.cli.output import show as draw
from trainatomy.cli.output import show_json
from trainatomy.cli.report import HTML, OPEN, check_report, write_report
from trainatomy.option import option, required
from trainatomy.records.store import Store
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.measurement import record_page
from trainatomy.requests.measuring import RECORDS


@dataclass(frozen=True, slots=True)
class ShowCommand:
    """A record to show."""

    record: str = required(
        "An id or the start of one, the hash at its end, `last`, `last~1`, or the path of a record file.",
        name="",
        metavar="RECORD",
    )
    records: str | None = option(None, RECORDS)
    html: Path | None = option(None, HTML)
    open_report: bool = option(False, OPEN)
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)


@command
def show(request: ShowCommand) -> None:
    """Show a measured run beside its prediction as it was recorded, with command and date."""
    page = check_report(request.html, request.open_report)
    found = Store(request.records).read(request.record)
    write_report(page, found.measurement, is_opened=request.open_report, prediction=found.prediction)
    if request.json:
        show_json(to_json(found))
    else:
        draw(record_page(found))
