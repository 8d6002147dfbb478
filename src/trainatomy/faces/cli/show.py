"""``trainatomy show``: a record, drawn again."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.faces.cli.options import Debug, Json, Records
from trainatomy.faces.cli.output import show as draw
from trainatomy.faces.cli.output import show_json
from trainatomy.faces.json import record_to_json
from trainatomy.faces.text.record import record_page
from trainatomy.records.store import Store

Which = Annotated[
    str,
    typer.Argument(
        metavar="RECORD",
        help="Its id or the beginning of it, the hash at its end, `last`, `last~1`, or the path of its file.",
    ),
]


def show(record: Which, records: Records = None, json: Json = False, debug: Debug = False) -> None:
    """Draw a measured run again: what the GPU said beside the prediction, as on the day, with command and date."""
    found = Store(records).read(record)
    if json:
        show_json(record_to_json(found))
    else:
        draw(record_page(found))
