"""``trainatomy history``: the measured runs on record."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.errors import TrainatomyError
from trainatomy.faces.cli.options import Debug, Json
from trainatomy.faces.cli.output import show, show_json
from trainatomy.faces.json import history_to_json
from trainatomy.faces.text import history_page
from trainatomy.records.query import Query
from trainatomy.records.store import Store

_WHICH = "Which records"

Records = Annotated[
    str | None,
    typer.Option(
        "--records",
        metavar="PATH",
        help="The folder of records, or its URL. Default: TRAINATOMY_RECORDS, else ./trainatomy-records.",
        show_default=False,
    ),
]
Gpu = Annotated[str, typer.Option("--gpu", help="Text in the GPU's name.", rich_help_panel=_WHICH, show_default=False)]
Name = Annotated[
    str, typer.Option("--name", help="Text in the training's name.", rich_help_panel=_WHICH, show_default=False)
]
Status = Annotated[
    str,
    typer.Option(
        "--status",
        metavar="STATUS",
        help='"completed" or "out of memory"; the beginning will do.',
        rich_help_panel=_WHICH,
        show_default=False,
    ),
]
Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="DATE",
        help="Made then or later: 2026-11-21 or 2026-11-21T14:30, UTC.",
        rich_help_panel=_WHICH,
        show_default=False,
    ),
]
Group = Annotated[
    str | None,
    typer.Option("--group", help="Those of one comparison.", rich_help_panel=_WHICH, show_default=False),
]
Last = Annotated[
    int | None,
    typer.Option("--last", metavar="N", help="The newest N of them.", rich_help_panel=_WHICH, show_default=False),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        help="A setting of the workload, such as train.bf16=true, also where it was left at its default; repeatable.",
        rich_help_panel=_WHICH,
        show_default=False,
    ),
]


def history(
    records: Records = None,
    gpu: Gpu = "",
    name: Name = "",
    status: Status = "",
    since: Since = "",
    group: Group = None,
    last: Last = None,
    where: Where = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the measured runs on record, the newest last; with conditions, those that meet all of them.

    A file that is no record is named below the table, with the reason, and keeps nothing else from being listed.
    """
    query = Query(gpu, name, status, since, group, last, tuple(where or ()))
    store = Store(records)
    if records is not None and not store.exists():
        raise TrainatomyError(f"There is no folder {records}; `trainatomy measure` makes one when it writes a record.")
    found = store.history(query)
    if json:
        show_json(history_to_json(found))
    else:
        show(history_page(found))
