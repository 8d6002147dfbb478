"""Which libraries a run has used so far: each is loaded at its first use, and stays in the context."""

from __future__ import annotations

_CUBLAS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_addmm_activation", "_grouped_mm"}
)
_CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"


def libraries_of(operation: str, in_backward: bool) -> tuple[str, ...]:
    """Names, as cards give what they add (``facts.cards.Context.loads_bytes``), of what "aten::mm" needs.

    Autograd's thread has a cuBLAS handle of its own; cuDNN loads kernels for forward and for backward apart.
    """
    name = operation.removeprefix("aten::")
    if name in _CUBLAS:
        return ("cublas_backward",) if in_backward else ("cublas",)
    if name.startswith(_CUDNN_ATTENTION):
        return ("cudnn_backward",) if in_backward and name.endswith("backward") else ("cudnn",)
    if name.startswith(("convolution", "_cudnn_rnn", "cudnn_")):
        return ("cudnn_backward",) if name.endswith("backward") else ("cudnn", "convolution")
    return ()
