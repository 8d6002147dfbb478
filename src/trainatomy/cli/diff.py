"""``trainatomy diff``: compare two records."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.cli.options import Debug, Json, Records
from trainatomy.cli.output import show, show_json
from trainatomy.records.difference import difference
from trainatomy.records.store import Store
from trainatomy.reporters.json import difference_to_json
from trainatomy.reporters.text.difference import difference_page

First = Annotated[str, typer.Argument(metavar="A", help="A record, as in `trainatomy show`.")]
Second = Annotated[str, typer.Argument(metavar="B", help="The record to compare it with.")]


def diff(a: First, b: Second, records: Records = None, json: Json = False, debug: Debug = False) -> None:
    """Compare two measured runs: their workloads, machines and libraries, and the memory of each component.

    Components are measured if both records have them, else predicted; the output says which.
    """
    store = Store(records)
    found = difference(store.read(a), store.read(b))
    if json:
        show_json(difference_to_json(found))
    else:
        show(difference_page(found))
