"""Collectives, as the simulation writes them: ``nccl::<kind>``."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

_KINDS = "all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send recv barrier"

COMMUNICATION = family(
    Operator(
        "",
        "communication",
        0,
        "a move between GPUs; the additions of a reduction belong to no model",
        launch="collective",
        cost="communication:collective",
    ),
    row(" ".join(f"nccl::{kind}" for kind in _KINDS.split())),
    row("peer::copy", cost="communication:peer_copy"),
)
