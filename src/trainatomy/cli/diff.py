"""``trainatomy diff``: what changed between two records."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.cli.options import Debug, Json, Records
from trainatomy.cli.output import show, show_json
from trainatomy.records.difference import difference
from trainatomy.records.store import Store
from trainatomy.reporters.json import difference_to_json
from trainatomy.reporters.text import difference_page

First = Annotated[str, typer.Argument(metavar="A", help="A record, named as for `trainatomy show`.")]
Second = Annotated[str, typer.Argument(metavar="B", help="The record to hold against it.")]


def diff(a: First, b: Second, records: Records = None, json: Json = False, debug: Debug = False) -> None:
    """Say what changed from one measured run to another, in the workload and in what it ran on and with, and which
    component the memory went to.

    Components are the measured ones where both records have them, else the predicted ones; the page says which.
    """
    store = Store(records)
    found = difference(store.read(a), store.read(b))
    if json:
        show_json(difference_to_json(found))
    else:
        show(difference_page(found))
