"""Memory that cuDNN allocates: workspaces of convolutions, workspace and reserve of recurrent layers.

cuDNN documents neither. Where its library is installed, it is asked what it would choose for a convolution
(``heuristics``). All rules here were derived from random calls on an H200 (cuDNN 9.19, torch 2.11;
``benchmarks/kernels/workspaces.py``) and from recorded trainings.
"""

from __future__ import annotations

from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.grouped import grouped
from trainatomy.operators.allocation.cudnn.ungrouped import forward, input_gradient
from trainatomy.operators.allocation.cudnn.weight_gradient import weight_gradient

_UNGROUPED = {"forward": forward, "input gradient": input_gradient, "weight gradient": weight_gradient}


def workspace(kind: Kind, one: Convolution) -> int:
    """Return the bytes of workspace of one operation of a convolution.

    For a transposed convolution, ``kind`` is the operation of the convolution that it is the gradient of.
    """
    return grouped(kind, one) if one.groups > 1 else _UNGROUPED[kind](one)
