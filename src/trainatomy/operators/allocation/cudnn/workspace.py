"""The workspace of one operation of a convolution in cuDNN."""

from __future__ import annotations

from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.grouped import grouped
from trainatomy.operators.allocation.cudnn.ungrouped import forward, input_gradient
from trainatomy.operators.allocation.cudnn.weight_gradient import weight_gradient

_OF = {"forward": forward, "input gradient": input_gradient, "weight gradient": weight_gradient}


def workspace(kind: Kind, one: Convolution) -> int:
    """Return the bytes of workspace.

    For a transposed convolution, ``kind`` is the operation of the convolution that it is the gradient of.
    """
    return grouped(kind, one) if one.groups > 1 else _OF[kind](one)
