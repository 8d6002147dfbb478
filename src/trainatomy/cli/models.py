"""``trainatomy models``: the model architectures that ship as data."""

from __future__ import annotations

from trainatomy.catalog.architectures import architectures
from trainatomy.cli.options import Debug, Json
from trainatomy.cli.output import show, show_json
from trainatomy.reporters.json import architectures_to_json
from trainatomy.reporters.text.catalog import architectures_table


def models(json: Json = False, debug: Debug = False) -> None:
    """List the model architectures that need no network, by their name on the Hugging Face hub."""
    entries = architectures()
    if json:
        show_json(architectures_to_json(entries))
    else:
        show(architectures_table(entries))
