"""``trainatomy show``: show a measured run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trainatomy.cli.options import Debug, Json, command
from trainatomy.cli.output import show as draw
from trainatomy.cli.output import show_json
from trainatomy.cli.report import Html, Open, check_report, write_report
from trainatomy.option import Option
from trainatomy.records.store import Store
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.measurement import record_page
from trainatomy.requests.measuring import Records


@dataclass(frozen=True, slots=True)
class ShowCommand:
    """A record to show."""

    record: Annotated[
        str,
        Option(
            "",
            "An id or the start of one, the hash at its end, `last`, `last~1`, or the path of a record file.",
            metavar="RECORD",
        ),
    ]
    records: Records = None
    html: Html = None
    open_report: Open = False
    json: Json = False
    debug: Debug = False


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
