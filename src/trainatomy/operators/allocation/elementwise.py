"""Elementwise operators whose kernels allocate scratch, or allocate results in another order than they return them.

Most do neither: type promotion, broadcasting and copies between layouts happen inside the kernel (``gpu_kernel`` casts
as it loads), and inputs are never copied to a common type on CUDA (ATen/TensorIterator.cpp, ``compute_types``).

Softmax and losses.

Multi-tensor (``_foreach_*``), fused optimizer and gradient scaler kernels.

Memory of interpolations besides their results.

The gradient of a linear interpolation reads the gradient of its output after making it contiguous.
Source: aten/src/ATen/native/cuda/UpSampleLinear1d.cu (``upsample_linear1d_backward_out_cuda_template``), and the
allocations of a recorded training (torch 2.11).

torchvision's pooling of regions: results that are zeroed first, then contiguous copies of what is read.

Source: torchvision/csrc/ops/cuda/roi_align_kernel.cu, roi_pool_kernel.cu, ps_roi_align_kernel.cu,
ps_roi_pool_kernel.cu, torchvision 0.24-0.29.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainatomy.operators.allocation.plan import (
    Free,
    KernelCall,
    Out,
    Plan,
    Scratch,
    bound,
    ceil_div,
    compute_type,
    contiguous_copies,
    dense_bytes,
    tensor_list,
)
from trainatomy.operators.allocation.reduction import InputGeometry, Kernel, reduction_iterator, reduction_scratch


def native_dropout(call: KernelCall) -> Plan:
    """Plan the mask before the result (aten/src/ATen/native/cuda/Dropout.cu, ``dropout_cuda``).

    Evaluation and p = 1 draw no random numbers and keep the order of the results.
    """
    named = bound(call)
    if named["train"] is False or named["p"] == 1:
        return [Out(0), Out(1)]
    return [Out(1), Out(0)]


def isinf(call: KernelCall) -> Plan:
    """Plan |x| as a tensor of its own: |x| = ∞ (aten/src/ATen/native/TensorCompare.cpp)."""
    return [Scratch(dense_bytes(bound(call)["self"]), "absolute value"), Out(0)]


def affine_grid(call: KernelCall) -> Plan:
    """Plan the base grid, and for each of its dimensions the coordinates with their steps.

    Source: aten/src/ATen/native/AffineGridGenerator.cpp (``make_base_grid_4D``, ``linspace_from_neg_one``),
    torch 2.9-2.13.
    """
    sizes = [int(size) for size in call.args[1]][2:]
    itemsize = call.outputs[0].itemsize
    points = call.outputs[0].numel() // len(sizes)
    plan: list[Scratch | Free] = [Scratch(points * (len(sizes) + 1) * itemsize, "base grid")]
    is_aligned = bool(call.args[2])
    for size in reversed(sizes):
        names = ["coordinates"] if is_aligned or size <= 1 else ["coordinates", "product", "quotient"]
        plan += [Scratch(size * itemsize, f"{name} {size} {len(plan)}") for name in names]
        plan += [Free(one.name) for one in plan[-len(names) :] if isinstance(one, Scratch)]
    return (*plan, Out(0))


def roll(call: KernelCall) -> Plan:
    """Plan one tensor per dimension, which are rolled one after the other.

    Source: aten/src/ATen/native/TensorTransformations.h (``roll_common``), torch 2.9-2.13.
    """
    dims = call.args[2] if len(call.args) > 2 else call.kwargs.get("dims", ())
    size = call.outputs[0].untyped_storage().nbytes()
    steps = [Scratch(size, f"rolled {number}") for number in range(len(dims) - 1)]
    return (*steps, Out(0))


def where(call: KernelCall) -> Plan:
    """Plan copies of values that have another type than the result, or that are numbers in host memory.

    Source: aten/src/ATen/native/TensorCompare.cpp (``where_self_out``), torch 2.9-2.13.
    """
    named, result = bound(call), call.outputs[0]
    values = [(name, named[name]) for name in ("self", "other") if isinstance(named[name], torch.Tensor)]
    cast = [(name, each) for name, each in values if each.is_meta and each.dtype != result.dtype]
    moved = [(name, each) for name, each in values if not each.is_meta]
    plan: list[Scratch | Out] = [Scratch(each.numel() * result.itemsize, f"{name} cast") for name, each in cast]
    plan += [Scratch(result.itemsize, f"{name} on the GPU") for name, _ in moved]
    return (*plan, Out(0))


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


_CHUNK = 65536
_FAST_ORDERS = (1.0, 2.0, float("inf"))


def foreach_norm(call: KernelCall) -> Plan:
    """Plan accumulators for every tensor, as many as the largest has chunks of 65,536 elements; the results.

    bytes = tensors · ⌈largest / 65536⌉ · size of the compute type. Without the fast route the tensors are reduced one
    by one.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (``foreach_tensor_norm_cuda``), torch 2.9-2.13.
    """
    named = bound(call)
    tensors = tensor_list(named["self"])
    if not _fast(tensors, float(named.get("ord", 2))):
        return _one_by_one(call, tensors)
    return _chunked(call, tensors, compute_type(call.outputs[0].dtype).itemsize)


def foreach_max(call: KernelCall) -> Plan:
    """Plan accumulators of the tensors' type (``foreach_tensor_max_cuda``), else as ``foreach_norm``."""
    tensors = tensor_list(bound(call)["self"])
    return _chunked(call, tensors, call.outputs[0].dtype.itemsize)


def _chunked(call: KernelCall, tensors: Sequence[torch.Tensor], accumulator_bytes: int) -> Plan:
    results = [Out(index) for index in range(len(call.outputs))]
    chunks = max((ceil_div(tensor.numel(), _CHUNK) for tensor in tensors), default=0)
    if not chunks:
        return results
    return [Scratch(len(tensors) * chunks * accumulator_bytes, "chunks"), *results, Free("chunks")]


def _fast(tensors: Sequence[torch.Tensor], order: float) -> bool:
    """Return ``can_use_fast_route`` (ForeachUtils.h): one floating type, dense tensors, a supported order."""
    return order in _FAST_ORDERS and all(
        tensor.dtype == tensors[0].dtype and tensor.is_floating_point() and _is_dense(tensor) for tensor in tensors
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _one_by_one(call: KernelCall, tensors: Sequence[torch.Tensor]) -> Plan:
    """Plan one reduction to a single number after another."""
    plan: list[Out | Scratch | Free] = []
    for index, (tensor, result) in enumerate(zip(tensors, call.outputs, strict=True)):
        size = tensor.dtype.itemsize
        layout = InputGeometry(tuple(tensor.shape), tuple(tensor.stride()), size, int(tensor.storage_offset()))
        iterator = reduction_iterator(layout, (True,) * tensor.dim(), (result.dtype.itemsize,))
        kernel = Kernel(compute_type(tensor.dtype).itemsize, size)
        plan += [Out(index), *reduction_scratch(iterator, kernel, call.processor, result.dtype.itemsize)]
    return plan


def linear_gradient(call: KernelCall) -> Plan:
    """Plan the gradient of an interpolation over one dimension."""
    return [Out(0), *contiguous_copies(bound(call)["grad_output"])]


def pooled(call: KernelCall) -> Plan:
    """Return what pooling allocates, and the gradient of position-sensitive pooling: it copies both first arguments."""
    return _with_copies(call, (0, 1))


def scattered(call: KernelCall) -> Plan:
    """Return what the gradient of ``roi_align`` allocates: it reads its argument by strides."""
    return _with_copies(call, (1,))


def scattered_by_number(call: KernelCall) -> Plan:
    """Return what the gradient of ``roi_pool`` allocates, which also reads where the largest numbers were."""
    return _with_copies(call, (2, 1))


def _with_copies(call: KernelCall, places: Iterable[int]) -> Plan:
    copied = (call.args[place] for place in places if not call.args[place].is_contiguous())
    return [
        *(Out(number) for number in range(len(call.outputs))),
        *(
            Scratch(tensor.numel() * tensor.itemsize, f"contiguous copy {number}")
            for number, tensor in enumerate(copied)
        ),
    ]
