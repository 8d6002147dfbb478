"""The registry's rows: one for each operator that the package knows.

A family states what its operators share; a row states its names and what differs. ``operator.Operator`` explains the
columns. To add an operator, add a row; a rule or cost function that it names is written in ``operators.allocation`` or
``operators.cost``.  Collectives (``c10d::…``) have no rows: ``simulator.parallel`` knows what they do.

FLOP are counted by the rule of the paper's authors (github.com/spcl/substation, substation/arith_counter.py): an
addition, a multiplication, a division, an exponential, a hyperbolic tangent and a square root are one each; minimum,
maximum, comparisons and moves are none; a reduction is one for each element that goes in. Formulas of the operators:
their definitions (substation/attention.py, substation/transformer.py) where they have one, else PyTorch's.
"""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.contractions import CONTRACTIONS
from trainatomy.operators.table.elementwise import ELEMENTWISE, LISTS, LOSS_FUNCTIONS
from trainatomy.operators.table.libraries import COMMUNICATION, LOSSES, QUANTISED_WEIGHTS, TRITON, VISION
from trainatomy.operators.table.moves import HOST, MOVES
from trainatomy.operators.table.normalisations import NORMALISATIONS

OPERATORS: dict[str, Operator] = {}
"""The row of each operator by its name."""

_ROWS = (
    CONTRACTIONS,
    NORMALISATIONS,
    ELEMENTWISE,
    LOSS_FUNCTIONS,
    MOVES,
    LISTS,
    QUANTISED_WEIGHTS,
    TRITON,
    LOSSES,
    VISION,
    HOST,
    COMMUNICATION,
)
for _operator in (row for rows in _ROWS for row in rows):
    if _operator.name in OPERATORS:
        raise ValueError(f"operators/table describes {_operator.name} twice")
    OPERATORS[_operator.name] = _operator
