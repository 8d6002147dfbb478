"""``trainatomy history``: list measured runs.

``trainatomy diff``: compare two records.
"""

from __future__ import annotations

from dataclasses import dataclass

import typer

from trainatomy.cli.options import DEBUG, JSON, command, refuse_together
from trainatomy.cli.output import show_result
from trainatomy.errors import TrainatomyError
from trainatomy.option import in_output, option, required
from trainatomy.records.query import Query
from trainatomy.records.reading import difference
from trainatomy.records.store import Store
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.history import difference_page, history_page
from trainatomy.reporters.viewers import openmetrics as openmetrics_text
from trainatomy.requests.measuring import RECORDS
from trainatomy.units import printable


@dataclass(frozen=True, slots=True)
class HistoryCommand(Query):
    """Records to list."""

    records: str | None = option(None, RECORDS)
    openmetrics: bool = in_output(False, "Print the records as OpenMetrics text, for Prometheus; excludes --json.")
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)

    def __post_init__(self) -> None:
        """Raise ``BadParameter`` for an invalid condition."""
        refuse_together({"--openmetrics": self.openmetrics, "--json": self.json})
        try:
            Query.__post_init__(self)
        except TrainatomyError as error:
            raise typer.BadParameter(str(error)) from None


@command
def history(request: HistoryCommand) -> None:
    """List measured runs, the newest last; with filters, those that match all of them.

    Files that are not records are named below the table, with the reason.
    """
    store = Store(request.records)
    if request.records is not None and not store.exists():
        raise TrainatomyError(
            f"There is no folder {request.records}; `trainatomy measure` creates it with the first record."
        )
    found = store.history(request)
    if request.openmetrics:
        print(printable(openmetrics_text(found)), end="")
    else:
        show_result(to_json, history_page, found, json=request.json)


@dataclass(frozen=True, slots=True)
class DiffCommand:
    """Two records to compare."""

    a: str = required("A record, as in `trainatomy show`.", name="", metavar="A")
    b: str = required("The record to compare it with.", name="", metavar="B")
    records: str | None = option(None, RECORDS)
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)


@command
def diff(request: DiffCommand) -> None:
    """Compare two measured runs: their workloads, machines and libraries, and the memory of each component.

    Components are measured if both records have them, else predicted; the output says which.
    """
    store = Store(request.records)
    found = difference(store.read(request.a), store.read(request.b))
    show_result(to_json, difference_page, found, json=request.json)
