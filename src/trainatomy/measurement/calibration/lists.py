"""Calibration cases on lists of tensors (optimizers), on tiny tensors, and of transfers between CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.measurement.calibration.cases import BF16, F32, MIB, Case, leaf, random

if TYPE_CHECKING:
    from trainatomy.measurement.calibration.cases import Work

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
