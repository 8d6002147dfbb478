"""Memory that cuDNN allocates: workspaces of convolutions, workspace and reserve of recurrent layers.

cuDNN documents neither. Where its library is installed, it is asked what it would choose for a convolution
(``heuristics``). Elsewhere, trees that were learned from its answers for an H200 decide about most convolutions
(``learned``), and rules that were derived from random calls (cuDNN 9.19, torch 2.11;
``benchmarks/kernels/workspaces.py``) and recorded trainings about the others.
"""

from __future__ import annotations

from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.grouped import grouped
from trainatomy.operators.allocation.cudnn.learned import learned_workspace
from trainatomy.operators.allocation.cudnn.ungrouped import forward, input_gradient, weight_gradient

_UNGROUPED = {"forward": forward, "input gradient": input_gradient, "weight gradient": weight_gradient}


def workspace(kind: Kind, one: Convolution) -> int:
    """Return the bytes of workspace of one operation of a convolution.

    For a transposed convolution, ``kind`` is the operation of the convolution that it is the gradient of.
    """
    learned = learned_workspace(kind, one)
    return by_hand(kind, one) if learned is None else learned


def by_hand(kind: Kind, one: Convolution) -> int:
    """Return the bytes by the rules that were written by hand."""
    return grouped(kind, one) if one.groups > 1 else _UNGROUPED[kind](one)
