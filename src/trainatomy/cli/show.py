"""``trainatomy show``: a record, drawn again."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.cli.options import Debug, Json, Records
from trainatomy.cli.output import show as draw
from trainatomy.cli.output import show_json
from trainatomy.records.store import Store
from trainatomy.reporters.json import record_to_json
from trainatomy.reporters.text import record_page

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
