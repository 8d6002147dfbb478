"""``trainatomy history``: the measured runs on record."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainatomy.cli.options import Debug, Json, Records
from trainatomy.cli.output import show, show_json
from trainatomy.errors import TrainatomyError
from trainatomy.records.query import Query
from trainatomy.records.store import Store
from trainatomy.reporters.json import history_to_json
from trainatomy.reporters.text import history_page


def _condition(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel="Which records", show_default=False, **more)


Gpu = Annotated[str, _condition("--gpu", "Text in the GPU's name.")]
Name = Annotated[str, _condition("--name", "Text in the training's name.")]
Status = Annotated[
    str, _condition("--status", '"completed" or "out of memory"; the beginning will do.', metavar="STATUS")
]
Since = Annotated[
    str, _condition("--since", "Made then or later: 2026-11-21 or 2026-11-21T14:30, UTC.", metavar="DATE")
]
Group = Annotated[str | None, _condition("--group", "Those of one comparison.")]
Last = Annotated[int | None, _condition("--last", "The newest N of them.", metavar="N")]
Where = Annotated[
    list[str] | None,
    _condition(
        "--where",
        "A setting of the workload, such as train.bf16=true, also where it was left at its default; repeatable.",
        metavar="KEY=VALUE",
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
