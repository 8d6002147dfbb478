"""Connectionist temporal classification by PyTorch's own kernels.

Source: aten/src/ATen/native/cuda/LossCTC.cu, torch 2.9-2.13. The lengths and the offsets of the targets are copied to
the GPU; alpha and beta are ``[N, F, 2 T + 1]`` each, T the longest target. cuDNN's implementation (int32 targets on the
CPU, blank 0) is not modelled.
"""

from __future__ import annotations

from trainatomy.operators.allocation.arguments import bound
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch


def _lengths(samples: int) -> Plan:
    """Plan lengths of targets and inputs, and offsets of the targets: int64 each."""
    return [Scratch(8 * samples, name) for name in ("target lengths", "input lengths", "offsets")]


def forward(call: KernelCall) -> Plan:
    """Plan alpha before the losses (``ctc_loss_gpu_template``)."""
    return [*_lengths(bound(call)["log_probs"].shape[1]), Out(1), Out(0)]


def backward(call: KernelCall) -> Plan:
    """Plan beta, the gradient, and for large problems the sum over the blanks and its exponentials.

    Sources: ``ctc_loss_backward_gpu_template``; ``logsumexp`` of ReduceOps.cpp.
    """
    named = bound(call)
    probabilities, alpha = named["log_probs"], named["log_alpha"]
    frames, samples, labels = probabilities.shape
    begun: Plan = [*_lengths(samples), Scratch(alpha.nbytes, "beta"), Out(0)]
    if 2 * frames + 24 * samples // 10 + 2 * labels // 10 <= 450:
        return begun
    blanks = samples * frames * (alpha.shape[2] // 2 + 1) * alpha.itemsize
    return [*begun, Scratch(blanks, "blanks"), Scratch(blanks, "exponentials"), Free("exponentials"), Free("blanks")]
