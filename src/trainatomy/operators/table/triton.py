"""Triton kernels, which ``simulator.triton`` and ``simulator.compiled`` write as operations."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

TRITON = family(
    Operator(
        "",
        "elementwise",
        None,
        "no formula: the arithmetic of a Triton kernel is its own",
        launch="library",
        cost="elementwise:moved_once",
    ),
    row("triton::kernel"),
    row("inductor::kernel", cost="elementwise:fused"),
    row("inductor::tuning", cost="elementwise:fused"),
)
