"""Compute-bound calibration cases: matrix products, attention, convolutions, by size and dtype.

A ``Case`` makes its tensors when it is called and returns the work to time; its backward, if it has one, is timed with
it, operator by operator.  Values are random: a GPU is faster on zeros, which take it less power.

Calibration cases on lists of tensors (optimizers), on tiny tensors, and of transfers between CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Work = Callable[[], Any]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MIB = 2**20


class Case(NamedTuple):
    """A piece of work to time.

    Attributes:
        make: Makes the tensors and returns the work to time.
        tf32: Let fp32 matrix products use tensor cores while it runs.
        warm: Keep the GPU busy before timing until its clock frequency is stable.
        runs: Number of timed runs.
    """

    make: Callable[[], Work]
    tf32: bool = False
    warm: bool = False
    runs: int = 5


def leaf(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Return a random tensor that requires a gradient."""
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def both_ways(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Work:
    """Return the forward and backward of ``function``, with a random gradient of the output."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    gradient = torch.randn_like(function(*inputs))

    def work() -> None:
        torch.autograd.grad(function(*inputs), wanted, gradient)

    return work


def through(function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Work:
    """Return the forward and backward of a function of one tensor."""
    return both_ways(function, leaf(*shape, dtype=dtype))


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Return a random tensor without a gradient."""
    return torch.randn(shape, device="cuda", dtype=dtype)


LINEAR = (  # tokens, from, to: forward, gradient of the input and gradient of the weight are three products
    (128, 768, 768), (128, 768, 3072), (231, 768, 768), (512, 768, 3072), (512, 1024, 1024), (640, 768, 768),
    (1024, 768, 2304), (1024, 3072, 768), (1024, 1024, 4096), (1500, 768, 3072), (2048, 1024, 1024),
    (2048, 2048, 2048), (2048, 512, 2048), (2048, 2048, 5632), (2400, 1024, 4096), (2400, 768, 768),
    (4096, 1024, 1024), (4096, 1024, 4096), (4096, 4096, 1024), (4096, 768, 768), (4096, 2048, 8192),
    (1536, 4096, 14336), (8192, 768, 3072), (8192, 3072, 768), (8192, 1024, 1024), (8192, 2048, 512),
    (1576, 768, 3072), (16384, 512, 512), (3108, 2048, 256), (900, 2560, 2560),
    (1024, 768, 30522), (1000, 768, 50257), (2048, 896, 151936), (512, 2048, 32000), (4096, 2048, 16),
    (4096, 16, 2048), (1024, 1024, 8), (32, 768, 768), (8, 1024, 1024), (8, 768, 2), (64, 2048, 1000),
)  # fmt: skip
SQUARES = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ODD = ((1000, 1000, 1000), (2049, 2047, 1025), (4100, 1030, 4100), (300, 50257, 769))
BATCHED = (  # batch, queries, keys, head: the two products of attention
    (96, 128, 128, 64), (48, 512, 512, 64), (96, 300, 300, 64), (192, 197, 197, 64), (24, 777, 777, 64),
    (16, 1024, 1024, 128), (128, 512, 512, 64), (64, 77, 77, 64), (8, 512, 512, 256), (12, 1500, 1500, 64),
    (768, 49, 49, 32), (96, 64, 512, 64),
)  # fmt: skip
PRECISIONS = ((BF16, False), (F16, False), (F32, False), (F32, True))


def matrix_products() -> Iterator[Case]:
    """Yield linear layers, square and odd shapes in four precisions; forward and backward give the layouts."""
    for dtype, tf32 in PRECISIONS:
        full = dtype != F16
        for index, (tokens, before, after) in enumerate(LINEAR):
            if full or index % 3 == 0:
                yield Case(partial(linear, tokens, before, after, dtype), tf32, warm=True)
        for tokens, before, after in LINEAR if full else ():
            yield Case(partial(without_bias, tokens, before, after, dtype), tf32, warm=True)
        for size in SQUARES if full else SQUARES[::3]:
            yield Case(partial(product, size, size, size, dtype), tf32, warm=True)
        for m, n, k in ODD:
            yield Case(partial(product, m, n, k, dtype), tf32, warm=True)


def linear(tokens: int, before: int, after: int, dtype: torch.dtype) -> Work:
    """Return a linear layer with a bias, forward and backward."""
    x, w, b = leaf(tokens, before, dtype=dtype), leaf(after, before, dtype=dtype), leaf(after, dtype=dtype)
    return both_ways(F.linear, x, w, b)


def without_bias(tokens: int, before: int, after: int, dtype: torch.dtype) -> Work:
    """Return the forward of a linear layer without a bias, for which PyTorch calls cuBLAS differently."""
    x, w = random(tokens, before, dtype=dtype), random(after, before, dtype=dtype)
    return lambda: F.linear(x, w)


def product(m: int, n: int, k: int, dtype: torch.dtype) -> Work:
    """Return one matrix product."""
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
    return lambda: torch.mm(a, b)


def batched_products() -> Iterator[Case]:
    """Yield the products of attention without a fused kernel."""
    for dtype, tf32 in PRECISIONS:
        for index, shape in enumerate(BATCHED):
            if dtype != F16 or index % 3 == 0:
                yield Case(partial(scores, *shape, dtype), tf32, warm=True)
                yield Case(partial(mixture, *shape, dtype), tf32, warm=True)


def scores(batch: int, queries: int, keys: int, head: int, dtype: torch.dtype) -> Work:
    """Return queries times transposed keys."""
    q, k = leaf(batch, queries, head, dtype=dtype), leaf(batch, keys, head, dtype=dtype)
    return both_ways(lambda q, k: torch.bmm(q, k.transpose(1, 2)), q, k)


def mixture(batch: int, queries: int, keys: int, head: int, dtype: torch.dtype) -> Work:
    """Return probabilities times values."""
    return both_ways(torch.bmm, leaf(batch, queries, keys, dtype=dtype), leaf(batch, keys, head, dtype=dtype))


def grouped_products() -> Iterator[Case]:
    """Yield the products of mixtures of experts."""
    for tokens, experts, before, after in (
        (2048, 8, 1024, 3584), (2048, 8, 3584, 1024), (4096, 16, 512, 1024), (8192, 8, 1024, 7168)
    ):  # fmt: skip
        yield Case(partial(grouped, tokens, experts, before, after), warm=True)


def grouped(tokens: int, experts: int, before: int, after: int) -> Work:
    """Return a grouped product with equal shares of the tokens for every expert."""
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (tokens // experts)
    x, w = leaf(tokens, before, dtype=BF16), leaf(experts, before, after, dtype=BF16)
    return both_ways(lambda x, w: torch._grouped_mm(x, w, offs=ends), x, w)


ATTENTION = (  # batch, heads, queries, keys, head, causal
    (8, 12, 128, 128, 64, False), (16, 12, 512, 512, 64, False), (4, 16, 512, 512, 64, False),
    (8, 12, 300, 300, 64, False), (32, 12, 197, 197, 64, False), (4, 12, 1024, 1024, 64, True),
    (2, 32, 1024, 1024, 64, True), (2, 32, 2048, 2048, 128, True), (4, 16, 777, 777, 128, True),
    (1, 32, 4096, 4096, 128, True), (2, 8, 512, 512, 256, True), (8, 12, 1500, 1500, 64, False),
    (1, 16, 512, 512, 64, False), (8, 8, 64, 512, 64, False), (2, 14, 512, 512, 64, True), (3, 32, 512, 512, 80, True),
    (4, 16, 2048, 2048, 64, True), (8, 16, 1024, 1024, 32, False), (8, 16, 1024, 1024, 72, False),
    (4, 16, 2048, 2048, 80, False), (8, 16, 1024, 1024, 96, False), (8, 16, 1024, 1024, 128, False),
    (2, 24, 4096, 4096, 128, False), (4, 8, 1024, 1024, 160, False), (4, 8, 1024, 1024, 256, False),
    (2, 10, 4096, 4096, 64, False), (2, 10, 4096, 77, 64, False), (4, 16, 1024, 1024, 32, True),
    (8, 16, 1024, 1024, 96, True), (4, 8, 2048, 2048, 192, True), (2, 32, 4096, 4096, 64, True),
)  # fmt: skip


def attention() -> Iterator[Case]:
    """Yield fused attention, by kernel, with a mask where the kernel accepts one."""
    flash, cudnn, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    for shape in ATTENTION:
        for backend, dtype in ((flash, BF16), (cudnn, BF16), (efficient, F32), (efficient, BF16)):
            for masked in (False,) if backend == flash else (False, True):
                yield Case(partial(fused, shape, backend, dtype, masked), warm=True)
    for shape in ATTENTION[:8]:
        for backend, dtype in ((cudnn, BF16), (flash, BF16), (efficient, F32)):
            yield Case(partial(fused, shape, backend, dtype, False, 0.1), warm=True)
    for shape in ATTENTION[::4]:
        yield Case(partial(fused, shape, flash, F16, False), warm=True)


def fused(
    shape: tuple[int, int, int, int, int, bool], backend: Any, dtype: torch.dtype, masked: bool, dropout: float = 0.0
) -> Work:
    """Return attention with one kind of kernel, on tensors laid out as projections leave them (heads inside tokens).

    ``shape`` is a row of ``ATTENTION``.
    """
    batch, heads, queries, keys, head, causal = shape
    q, k, v = (leaf(batch, length, heads, head, dtype=dtype) for length in (queries, keys, keys))
    mask = torch.zeros(batch, 1, queries, keys, device="cuda", dtype=dtype) if masked else None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, dropout, is_causal=causal and not masked
            )

    return both_ways(run, q, k, v)


Convolution = tuple[int, int, tuple[int, ...], int, int, int, int, int]
CONVOLUTIONS: tuple[Convolution, ...] = (
    # batch, from, image, to, kernel, stride, padding, groups
    (32, 3, (224, 224), 64, 7, 2, 3, 1), (32, 64, (56, 56), 64, 1, 1, 0, 1), (32, 64, (56, 56), 64, 3, 1, 1, 1),
    (32, 64, (56, 56), 256, 1, 1, 0, 1), (32, 128, (56, 56), 128, 3, 2, 1, 1), (32, 256, (56, 56), 512, 1, 2, 0, 1),
    (32, 128, (28, 28), 128, 3, 1, 1, 1), (32, 256, (14, 14), 256, 3, 1, 1, 1), (32, 1024, (14, 14), 256, 1, 1, 0, 1),
    (16, 64, (56, 56), 256, 1, 1, 0, 1), (16, 256, (56, 56), 64, 1, 1, 0, 1), (16, 512, (28, 28), 128, 1, 1, 0, 1),
    (32, 512, (7, 7), 512, 3, 1, 1, 1), (32, 512, (7, 7), 2048, 1, 1, 0, 1), (8, 3, (224, 224), 768, 16, 16, 0, 1),
    (32, 3, (224, 224), 1024, 14, 14, 0, 1), (16, 96, (56, 56), 96, 7, 1, 3, 96),
    (16, 384, (14, 14), 384, 7, 1, 3, 384), (4, 80, (3000,), 768, 3, 1, 1, 1),
    (4, 768, (3000,), 768, 3, 2, 1, 1), (4, 512, (7999,), 512, 3, 2, 0, 1),
)  # fmt: skip


def convolutions() -> Iterator[Case]:
    """Yield convolutions of images and sequences; in fp32 with TF32, which PyTorch allows cuDNN by default."""
    for dtype in (F32, BF16):
        for layer in CONVOLUTIONS:
            yield Case(partial(convolution, layer, dtype), tf32=True, warm=True)


def convolution(layer: Convolution, dtype: torch.dtype) -> Work:
    """Return a convolution, forward and backward; with a bias if its outputs do not overlap (patches) and in 1D."""
    batch, before, image, after, kernel, stride, padding, groups = layer
    apply: Any = F.conv2d if len(image) == 2 else F.conv1d
    x = leaf(batch, before, *image, dtype=dtype)
    w = leaf(after, before // groups, *(kernel,) * len(image), dtype=dtype)
    biases = [leaf(after, dtype=dtype)] if stride == kernel > 1 or len(image) == 1 else []
    return both_ways(lambda x, w, *b: apply(x, w, *b, stride=stride, padding=padding, groups=groups), x, w, *biases)


def image_operators() -> Iterator[Case]:
    """Yield the operators between convolutions: normalisations and pooling."""
    for dtype in (F32, BF16):
        for batch, channels, side in (
            (32, 64, 112), (32, 256, 56), (32, 512, 28), (32, 2048, 7), (4, 64, 56),
            (16, 64, 56), (16, 256, 14), (16, 1024, 14), (16, 128, 28),
        ):  # fmt: skip
            yield Case(partial(batch_norm, *(batch, channels, side, side), dtype))
            if dtype is F32 and side > 7:
                yield Case(partial(batch_norm, *(batch, channels, side, side), F16))
        yield Case(partial(through, lambda x: F.max_pool2d(x, 3, 2, 1), (32, 64, 112, 112), dtype))
        yield Case(partial(through, lambda x: F.adaptive_avg_pool2d(x, 1), (32, 2048, 7, 7), dtype))
        yield Case(partial(group_norm, 4, 512, 7999, dtype))


def batch_norm(batch: int, channels: int, height: int, width: int, dtype: torch.dtype) -> Work:
    """Return batch normalisation in training."""
    mean, variance = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    inputs = leaf(batch, channels, height, width, dtype=dtype), leaf(channels), leaf(channels)
    return both_ways(lambda x, w, b: F.batch_norm(x, mean, variance, w, b, True), *inputs)


def group_norm(batch: int, channels: int, length: int, dtype: torch.dtype) -> Work:
    """Return group normalisation with one channel a group."""
    inputs = leaf(batch, channels, length, dtype=dtype), leaf(channels, dtype=dtype), leaf(channels, dtype=dtype)
    return both_ways(lambda x, w, b: F.group_norm(x, channels, w, b), *inputs)


PARAMETERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "small": ((768,),) * 300,
    "medium": ((768, 768),) * 72 + ((768,),) * 72,
    "base": ((30522, 768), (512, 768)) + ((768, 768),) * 48 + ((3072, 768),) * 24 + ((3072,),) * 12 + ((768,),) * 110,
    "large": ((1024, 1024),) * 96 + ((4096, 1024),) * 48 + ((4096,),) * 24 + ((1024,),) * 220,
    "one": ((8192, 8192),),
}


def optimizers() -> Iterator[Case]:
    """Yield steps of PyTorch's optimizers, gradient clipping and gradient unscaling."""
    for shapes in PARAMETERS.values():
        for options in ({"foreach": True}, {"fused": True}):
            yield Case(partial(optimizer_step, torch.optim.AdamW, shapes, F32, **options), runs=2)
        yield Case(partial(clipped, shapes, F32), runs=2)
    for shapes in (PARAMETERS["medium"], PARAMETERS["base"]):
        yield Case(partial(optimizer_step, torch.optim.AdamW, shapes, BF16, foreach=True), runs=2)
        yield Case(partial(optimizer_step, torch.optim.AdamW, shapes, BF16, fused=True), runs=2)
        yield Case(partial(optimizer_step, torch.optim.SGD, shapes, F32, foreach=True, momentum=0.9), runs=2)
        yield Case(partial(optimizer_step, torch.optim.RMSprop, shapes, F32, foreach=True), runs=2)
        yield Case(partial(clipped, shapes, BF16), runs=2)
        yield Case(partial(unscaled, shapes), runs=2)


def optimizer_step(kind: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, **options: Any) -> Work:
    """Return an optimizer step over parameters of those shapes."""
    parameters = [leaf(*shape, dtype=dtype) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step: Callable[[], Any] = kind(parameters, lr=1e-5, **options).step
    return step


def clipped(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Work:
    """Return the clipping of all gradients by their norm."""
    parameters = [leaf(*shape, dtype=dtype) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def unscaled(shapes: tuple[tuple[int, ...], ...]) -> Work:
    """Return the unscaling of gradients by a gradient scaler."""
    gradients = [random(*shape) for shape in shapes]
    found, scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)


def tiny_tensors() -> Iterator[Case]:
    """Yield operators on tiny tensors, for the minimum time of a kernel."""
    for function in (
        lambda x: x + 1, lambda x: x.sum(), lambda x: x.to(BF16), torch.zeros_like, torch.isfinite, torch.sqrt,
        lambda x: torch.arange(128, device="cuda"), lambda x: x.clone(), lambda x: x.expand(64).contiguous(),
        lambda x: x > 0, lambda x: torch.full((64,), 1.0, device="cuda"), lambda x: torch.cumsum(x.expand(512), 0),
    ):  # fmt: skip
        yield Case(partial(of_one_number, function))


def of_one_number(function: Callable[[torch.Tensor], torch.Tensor]) -> Work:
    """Return a function of a tensor with one element."""
    x = random(1)
    return lambda: function(x)


def transfers() -> Iterator[Case]:
    """Yield transfers to the GPU and back."""
    for size in (4096, MIB, 64 * MIB):
        for pinned in (False, True):
            yield Case(partial(to_gpu, size, pinned))
        yield Case(partial(to_cpu, size))


def to_gpu(size: int, pinned: bool) -> Work:
    """Return a transfer from pageable or pinned memory."""
    x = torch.randn(size // 4)
    x = x.pin_memory() if pinned else x
    return lambda: x.to("cuda", non_blocking=True)


def to_cpu(size: int) -> Work:
    """Return a transfer into pageable memory."""
    x = random(size // 4)
    return lambda: x.cpu()
