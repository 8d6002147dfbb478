"""Types that CUDA's kernels refuse, and meta kernels take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

HALF, BRAIN = torch.float16, torch.bfloat16


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def places(count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(count, device="cuda", dtype=dtype)


REFUSED: dict[str, Callable[[], object]] = {
    r"addmm: self \(bfloat16\) and mat1 \(float32\)": lambda: F.linear(
        made(4, 8), made(8, 8, dtype=BRAIN), made(8, dtype=BRAIN)
    ),
    r"_foreach_clamp_max has no kernel for complex numbers": lambda: torch._foreach_clamp_max_(
        [made(4, dtype=torch.complex64)], 1.0
    ),
    r"mm: self \(float32\) and mat2 \(float16\)": lambda: made(4, 8) @ made(8, 8, dtype=HALF),
    r"native_layer_norm: input \(float16\) and weight \(float32\)": lambda: F.layer_norm(
        made(4, 8, dtype=HALF), (8,), made(8), made(8)
    ),
    r"native_batch_norm: an input in float32 cannot have a weight in float16": lambda: F.batch_norm(
        made(4, 8), made(8), made(8), made(8, dtype=HALF), made(8, dtype=HALF), training=True
    ),
    r"index_add: self \(float32\) and source \(float16\)": lambda: made(4, 8).index_add(
        0, places(2), made(2, 8, dtype=HALF)
    ),
    r"index_put: self \(float32\) and values \(float16\)": lambda: made(4, 8).__setitem__(
        places(2), made(2, 8, dtype=HALF)
    ),
    r"index_put_?: self \(float32\) and values \(bfloat16\)": lambda: made(4, 8).__setitem__(
        torch.tensor([True, False, True, False]).to("cuda"), made(2, 8, dtype=BRAIN)
    ),
    r"binary_cross_entropy: self \(float32\) and target \(float64\)": lambda: F.binary_cross_entropy(
        made(4), made(4, dtype=torch.float64)
    ),
    r"nll_loss_forward: self \(float32\) and weight \(float16\)": lambda: F.cross_entropy(
        made(4, 8), places(4), weight=made(8, dtype=HALF)
    ),
    r"nll_loss_forward: target must be of type int64 or uint8, found int32": lambda: F.cross_entropy(
        made(4, 8), places(4, torch.int32)
    ),
    r"_fft_r2c: cuFFT transforms float16 of .* powers of two only, found 384": lambda: torch.fft.fft(
        made(4, 384, dtype=HALF)
    ),
    r"_fft_c2r: cuFFT transforms float16 of .* powers of two only, found 30": lambda: torch.fft.irfft(
        made(4, 16, dtype=torch.complex32), n=30
    ),
    r"linalg_cholesky_ex has no CUDA kernel for float16": lambda: torch.linalg.cholesky(made(4, 4, dtype=HALF)),
}


pytestmark = pytest.mark.usefixtures("process")


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_gpu_refuses_is_refused(message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        REFUSED[message]()


ACCEPTED: dict[str, Callable[[], Tensor]] = {
    "a norm in 16 bits with weights in float32": lambda: F.batch_norm(
        made(4, 8, dtype=HALF), made(8), made(8), made(8), made(8), training=True
    ),
    "a transform in 16 bits of a power of two": lambda: torch.fft.fft(made(3, 256, dtype=HALF)),
    "a transform of another size in 32 bits": lambda: torch.fft.fft(made(4, 384)),
    "a loss of two types": lambda: F.mse_loss(made(4), made(4, dtype=HALF)),
    "a copy into another type": lambda: made(4, 8).copy_(made(4, 8, dtype=HALF)),
    "a sum of two types": lambda: made(4, 8) + made(4, 8, dtype=BRAIN),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_a_gpu_takes_is_taken(what: str) -> None:
    assert ACCEPTED[what]() is not None


def test_a_linear_layer_in_inference_mode_is_checked_too() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"input \(float32\) and weight \(bfloat16\)|mat"):
        F.linear(made(4, 8), made(8, 8, dtype=BRAIN), made(8, dtype=BRAIN))


def test_autocast_casts_first_and_refuses_the_loss_of_probabilities() -> None:
    with torch.autocast("cuda", dtype=HALF):
        assert (made(4, 8) @ made(8, 8, dtype=HALF)).dtype is HALF
        with pytest.raises(RuntimeError, match="is refused under autocast"):
            F.binary_cross_entropy(made(4), made(4))
