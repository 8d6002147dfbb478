"""``trainatomy show``: show a measured run."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.cli.options import Debug, Json, Records
from trainatomy.cli.output import show as draw
from trainatomy.cli.output import show_json
from trainatomy.cli.report import Html, Open, check_report, write_report
from trainatomy.records.store import Store
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.measurement import record_page

Which = Annotated[
    str,
    typer.Argument(
        metavar="RECORD",
        help="An id or the start of one, the hash at its end, `last`, `last~1`, or the path of a record file.",
    ),
]


def show(
    record: Which,
    records: Records = None,
    html: Html = None,
    open_report: Open = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a measured run beside its prediction as it was recorded, with command and date."""
    page = check_report(html, open_report)
    found = Store(records).read(record)
    write_report(page, found.measurement, is_opened=open_report, prediction=found.prediction)
    if json:
        show_json(to_json(found))
    else:
        draw(record_page(found))
