"""``trainatomy history``: list measured runs.

``trainatomy diff``: compare two records.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainatomy.cli.options import Debug, Json, Records, in_output, refuse_together
from trainatomy.cli.output import show, show_json
from trainatomy.errors import TrainatomyError
from trainatomy.records.query import Query
from trainatomy.records.reading import difference
from trainatomy.records.store import Store
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.history import difference_page, history_page
from trainatomy.reporters.viewers import openmetrics as openmetrics_text
from trainatomy.units import printable


def _condition(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel="Filters", show_default=False, **more)


Gpu = Annotated[str, _condition("--gpu", "The GPU's name contains this.")]
Name = Annotated[str, _condition("--name", "The training's name contains this.")]
Status = Annotated[str, _condition("--status", '"completed" or "out of memory" (prefix match).', metavar="STATUS")]
Since = Annotated[
    str, _condition("--since", "Measured at this time or later: 2026-11-21 or 2026-11-21T14:30, UTC.", metavar="DATE")
]
Group = Annotated[str | None, _condition("--group", "Runs of one comparison.")]
Last = Annotated[int | None, _condition("--last", "The newest N runs.", metavar="N")]
Where = Annotated[
    list[str] | None,
    _condition(
        "--where",
        "A setting of the workload, such as train.bf16=true, stated or by default; repeatable.",
        metavar="KEY=VALUE",
    ),
]
OpenMetrics = Annotated[
    bool, in_output("--openmetrics", "Print the records as OpenMetrics text, for Prometheus; excludes --json.")
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
    openmetrics: OpenMetrics = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List measured runs, the newest last; with filters, those that match all of them.

    Files that are not records are named below the table, with the reason.
    """
    refuse_together({"--openmetrics": openmetrics, "--json": json})
    try:
        query = Query(gpu, name, status, since, group, last, tuple(where or ()))
    except TrainatomyError as error:
        raise typer.BadParameter(str(error)) from None
    store = Store(records)
    if records is not None and not store.exists():
        raise TrainatomyError(f"There is no folder {records}; `trainatomy measure` creates it with the first record.")
    found = store.history(query)
    if openmetrics:
        print(printable(openmetrics_text(found)), end="")
    elif json:
        show_json(to_json(found))
    else:
        show(history_page(found))


First = Annotated[str, typer.Argument(metavar="A", help="A record, as in `trainatomy show`.")]
Second = Annotated[str, typer.Argument(metavar="B", help="The record to compare it with.")]


def diff(a: First, b: Second, records: Records = None, json: Json = False, debug: Debug = False) -> None:
    """Compare two measured runs: their workloads, machines and libraries, and the memory of each component.

    Components are measured if both records have them, else predicted; the output says which.
    """
    store = Store(records)
    found = difference(store.read(a), store.read(b))
    if json:
        show_json(to_json(found))
    else:
        show(difference_page(found))
