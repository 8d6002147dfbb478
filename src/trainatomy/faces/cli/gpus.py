"""``trainatomy gpus``: the cards that ship as data."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.faces.cli.options import Debug, Json
from trainatomy.faces.cli.output import show, show_json
from trainatomy.faces.json import cards_to_json
from trainatomy.faces.text import card_page, cards_table
from trainatomy.facts.cards import card as find
from trainatomy.facts.cards import cards

Name = Annotated[
    str | None, typer.Argument(metavar="CARD", help="One card, with the source of every figure.", show_default=False)
]


def gpus(card: Name = None, json: Json = False, debug: Debug = False) -> None:
    """List the cards that trainatomy knows, or show one with the source of every figure."""
    chosen = cards() if card is None else (find(card),)
    if json:
        show_json(cards_to_json(chosen))
    else:
        show(cards_table(chosen) if card is None else card_page(chosen[0]))
