"""Softmax and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.operators.allocation.arguments import bound, compute_type, contiguous_copies
from trainatomy.operators.allocation.iterator import InputGeometry, reduction_iterator
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Scratch
from trainatomy.operators.allocation.reduction import Kernel, reduction_scratch

if TYPE_CHECKING:
    import torch

_NO_REDUCTION = 0


def softmax(call: KernelCall) -> Plan:
    """Plan the result, then a copy of an input that is not contiguous (SoftMax.cu, ``host_softmax``)."""
    return [Out(0), *contiguous_copies(bound(call)["self"])]


def log_softmax_backward(call: KernelCall) -> Plan:
    """Plan the result, then copies of inputs that are not contiguous (SoftMax.cu, ``host_softmax_backward``)."""
    named = bound(call)
    return [Out(0), *contiguous_copies(named["grad_output"], named["output"])]


def softmax_backward(call: KernelCall) -> Plan:
    """Plan the result, then gradient · output (SoftMax.cu, ``softmax_backward_cuda_out``)."""
    named = bound(call)
    gradient, output = named["grad_output"], named["output"]
    product = gradient.numel() * max(gradient.dtype.itemsize, output.dtype.itemsize)
    return [Out(0), Scratch(product, "gradient times output"), *contiguous_copies(output)]


def nll_loss(call: KernelCall) -> Plan:
    """Plan results, then contiguous copies, in both directions (aten/src/ATen/native/cuda/Loss.cu)."""
    named = bound(call)
    results = [Out(index) for index in range(len(call.outputs))]
    return [*results, *contiguous_copies(named["self"], named["target"], named["weight"])]


def elementwise_loss(call: KernelCall) -> Plan:
    """Plan ``mse_loss``, ``smooth_l1_loss``: the loss of every element, reduced into the result.

    The result keeps the storage that it had for the unreduced losses before it was resized to one number.

    Source: aten/src/ATen/native/Loss.cpp (``TORCH_META_FUNC(mse_loss)``, ``mse_loss_out``, ``smooth_l1_loss_out``).
    """
    named = bound(call)
    if named["reduction"] == _NO_REDUCTION:
        return [Out(0)]
    losses = _broadcast(named["self"], named["target"])
    size = losses * call.outputs[0].dtype.itemsize
    return [Out(0, size), Scratch(size, "losses"), *_reduced(call, losses)]


def huber_loss(call: KernelCall) -> Plan:
    """Plan the losses before the result (Loss.cpp, ``huber_loss``), else as ``elementwise_loss``."""
    named = bound(call)
    if named["reduction"] == _NO_REDUCTION:
        return [Out(0)]
    losses = named["self"].numel()
    return [Scratch(losses * call.outputs[0].dtype.itemsize, "losses"), Out(0), *_reduced(call, losses)]


def binary_cross_entropy(call: KernelCall) -> Plan:
    """Plan a result that keeps the storage of every element's loss, though it is reduced to one number.

    Source: aten/src/ATen/native/cuda/Loss.cu (``binary_cross_entropy_out_cuda``).
    """
    named = bound(call)
    if named["reduction"] == _NO_REDUCTION:
        return [Out(0)]
    losses, size = named["self"].numel(), call.outputs[0].dtype.itemsize
    return [Out(0, losses * size), Scratch(size, "reduced"), *_reduced(call, losses)]


def binary_cross_entropy_with_logits(call: KernelCall) -> Plan:
    """Plan log σ(x) and the losses, then the result; with a positive weight one more tensor.

    Source: aten/src/ATen/native/Loss.cpp.
    """
    named = bound(call)
    logits = named["self"]
    size = logits.numel() * logits.dtype.itemsize
    plan: list[Out | Scratch | Free] = [Scratch(size, "log sigmoid")]
    if named["pos_weight"] is not None:
        less_one = named["pos_weight"].numel() * named["pos_weight"].dtype.itemsize
        plan += [Scratch(less_one, "weight - 1"), Scratch(size, "log weight"), Free("weight - 1"), Free("log weight")]
    if named["reduction"] == _NO_REDUCTION:
        return [*plan, Out(0)]
    return [*plan, Scratch(size, "losses"), Out(0), *_reduced(call, logits.numel())]


def _broadcast(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return the number of elements of two tensors broadcast together."""
    count = 1
    sizes, others = list(first.shape), list(second.shape)
    while sizes or others:
        count *= max(sizes.pop() if sizes else 1, others.pop() if others else 1)
    return count


def _reduced(call: KernelCall, count: int) -> list[Scratch | Free]:
    """Plan the buffers of the mean or sum of ``count`` contiguous losses."""
    dtype = call.outputs[0].dtype
    size = dtype.itemsize
    iterator = reduction_iterator(InputGeometry((count,), (1,), size), (True,), (size,))
    kernel = Kernel(compute_type(dtype).itemsize, size, 8 if size == 2 else 4)
    return reduction_scratch(iterator, kernel, call.processor, size)


def _ctc_lengths(samples: int) -> Plan:
    """Plan lengths of targets and inputs, and offsets of the targets: int64 each."""
    return [Scratch(8 * samples, name) for name in ("target lengths", "input lengths", "offsets")]


def ctc_loss(call: KernelCall) -> Plan:
    """Plan alpha before the losses of PyTorch's own kernels.

    The lengths and the offsets of the targets are copied to the GPU; alpha and beta are [N, F, 2 T + 1] each, T the
    longest target. cuDNN's implementation (int32 targets on the CPU, blank 0) is not modelled.

    Source: aten/src/ATen/native/cuda/LossCTC.cu (``ctc_loss_gpu_template``), torch 2.9-2.13.
    """
    return [*_ctc_lengths(bound(call)["log_probs"].shape[1]), Out(1), Out(0)]


def ctc_loss_backward(call: KernelCall) -> Plan:
    """Plan beta, the gradient, and for large problems the sum over the blanks and its exponentials.

    Sources: ``ctc_loss_backward_gpu_template``; ``logsumexp`` of ReduceOps.cpp.
    """
    named = bound(call)
    probabilities, alpha = named["log_probs"], named["log_alpha"]
    frames, samples, labels = probabilities.shape
    begun: Plan = [*_ctc_lengths(samples), Scratch(alpha.nbytes, "beta"), Out(0)]
    if 2 * frames + 24 * samples // 10 + 2 * labels // 10 <= 450:
        return begun
    blanks = samples * frames * (alpha.shape[2] // 2 + 1) * alpha.itemsize
    return [*begun, Scratch(blanks, "blanks"), Scratch(blanks, "exponentials"), Free("exponentials"), Free("blanks")]
