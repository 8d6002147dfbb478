"""CUDA's autocast: casts by function, their order, and the copies that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.autocast import FP32, FP32_BY_DTYPE, LOWER_PRECISION, PROMOTE
from trainatomy.simulator.process import SimulatedProcess

HALF = torch.float16


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def autocast(dtype: torch.dtype = HALF, **options: Any) -> torch.autocast:
    return torch.autocast("cuda", dtype=dtype, **options)


def casts(process: SimulatedProcess, start: int) -> list[int]:
    """Return the bytes of the copies made since event ``start``."""
    origins = process.trace.origins
    return [
        event.bytes
        for event in process.trace.events[start:]
        if event.action == "alloc" and origins[event.allocation].operation in ("aten::_to_copy", "aten::to")
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda a: a @ a,
        lambda a: torch.mm(a, a),
        lambda a: F.linear(a, a),
        lambda a: torch.einsum("ij,jk->ik", a, a),
        lambda a: torch.bmm(a[None], a[None]),
        lambda a: torch.linalg.matmul(a, a),
        lambda a: F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]),
        lambda a: F.conv1d(a[None], a[:, :, None]),
    ],
)
def test_products_are_in_lower_precision(process: SimulatedProcess, function: Any, dtype: torch.dtype) -> None:
    with autocast(dtype):
        assert function(made(8, 8)).dtype == dtype
    assert function(made(8, 8)).dtype == torch.float32


def classes() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.long, device="cuda")


@pytest.mark.parametrize(
    "function",
    [
        torch.exp,
        torch.log,
        torch.rsqrt,
        lambda a: a.pow(2),
        lambda a: F.layer_norm(a, (8,)),
        lambda a: F.mse_loss(a, a),
        lambda a: F.softplus(a),
        lambda a: F.softmax(a, -1),
        lambda a: a.sum(),
        lambda a: a.cumsum(0),
        lambda a: a.norm(),
        torch.square,
        lambda a: a.square(),
        torch.special.expm1,
        lambda a: torch.special.logsumexp(a, -1),
        lambda a: torch.special.softmax(a, -1),
        torch.linalg.norm,
        lambda a: F.cross_entropy(a, classes()),
        lambda a: F.cross_entropy(a, classes(), weight=made(8)),
        lambda a: F.cross_entropy(a, classes(), label_smoothing=0.1),
        lambda a: F.cross_entropy(a, classes(), weight=made(8), label_smoothing=0.1),
        lambda a: F.cross_entropy(a, a),
    ],
)
def test_functions_that_need_range_run_in_fp32(process: SimulatedProcess, function: Any) -> None:
    with autocast():
        assert function(made(8, 8, dtype=HALF)).dtype == torch.float32


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, F.gelu, lambda a: a + a, lambda a: a.mean()])
def test_everything_else_keeps_its_type(process: SimulatedProcess, function: Any) -> None:
    with autocast():
        assert function(made(8, 8)).dtype == torch.float32
        assert function(made(8, 8, dtype=HALF)).dtype == HALF


def test_the_widest_type_wins_where_types_must_agree(process: SimulatedProcess) -> None:
    with autocast():
        wide, narrow = made(8), made(8, dtype=HALF)
        assert torch.dot(wide, narrow).dtype == torch.float32
        assert torch.addcmul(narrow, narrow, narrow).dtype == HALF
        assert torch.addcmul(narrow, wide, narrow).dtype == torch.float32


def test_a_requested_dtype_is_used(process: SimulatedProcess) -> None:
    with autocast():
        assert F.softmax(made(8, dtype=HALF), -1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert made(8, dtype=HALF).sum(dtype=HALF).dtype == HALF


def test_autocast_leaves_integers_doubles_and_cpu_tensors_alone(process: SimulatedProcess) -> None:
    with autocast():
        assert torch.mm(made(8, 8, dtype=torch.float64), made(8, 8, dtype=torch.float64)).dtype == torch.float64
        assert made(8, dtype=torch.int64).sum().dtype == torch.int64
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_weights_are_copied_once_and_labelled(process: SimulatedProcess) -> None:
    weight = nn.Parameter(made(64, 64))
    with autocast():
        start = len(process.trace.events)
        first, second = F.linear(made(8, 64), weight), F.linear(made(8, 64), weight)
        assert first.dtype == second.dtype == HALF
        assert sorted(casts(process, start)) == [1024, 1024, 8192]
    assert [process.trace.labels[n] for n in process.trace.labels].count("weight_copy") == 1


def test_cached_casts_are_freed_when_the_outermost_context_ends(process: SimulatedProcess) -> None:
    weight = nn.Parameter(made(64, 64))
    with autocast():
        with autocast():
            F.linear(made(8, 64), weight)
        inside = {e.allocation for e in process.trace.events if e.action == "free"}
    (copy,) = process.trace.labels
    assert copy not in inside
    assert copy in {e.allocation for e in process.trace.events if e.action == "free"}
    start = len(process.trace.events)
    with autocast():
        F.linear(made(8, 64), weight)
    assert 8192 in casts(process, start)


@pytest.mark.parametrize(
    "weight",
    [
        lambda: made(64, 64),  # needs no gradient
        lambda: nn.Parameter(made(128, 64))[:64],  # a view
        lambda: nn.Parameter(made(64, 64)) * 2,  # not a leaf
    ],
)
def test_only_leaves_that_need_gradients_are_kept(process: SimulatedProcess, weight: Any) -> None:
    tensor = weight()
    with autocast():
        start = len(process.trace.events)
        F.linear(made(8, 64), tensor)
        F.linear(made(8, 64), tensor)
        assert casts(process, start).count(8192) == 2
    assert "weight_copy" not in process.trace.labels.values()


def test_the_cache_can_be_switched_off(process: SimulatedProcess) -> None:
    weight = nn.Parameter(made(64, 64))
    with autocast(cache_enabled=False):
        start = len(process.trace.events)
        F.linear(made(8, 64), weight)
        F.linear(made(8, 64), weight)
        assert casts(process, start).count(8192) == 2


def test_casts_are_made_last_argument_first(process: SimulatedProcess) -> None:
    with autocast():
        start = len(process.trace.events)
        F.linear(made(8, 64), made(32, 64), made(32))
        assert casts(process, start) == [64, 4096, 1024]


def test_nothing_is_cast_where_the_result_is_given(process: SimulatedProcess) -> None:
    total, factor = made(8, 8), made(8, 8).to(HALF)
    with autocast():
        start = len(process.trace.events)
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
        assert not casts(process, start)


def test_nothing_is_cast_inside_a_function_that_is_listed(process: SimulatedProcess) -> None:
    """Check that math attention computes its products in fp32 for 16-bit inputs, since autocast is disabled there."""
    with autocast(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        query = nn.Parameter(made(1, 2, 8, 16))
        start = len(process.trace.events)
        F.scaled_dot_product_attention(query, query, query)
    origins = process.trace.origins
    fresh = [event for event in process.trace.events[start:] if event.action == "alloc"]
    products = [e.bytes for e in fresh if origins[e.allocation].operation == "aten::bmm"]
    assert products == [2 * 8 * 8 * 4, 2 * 8 * 16 * 4]
    assert (fresh[0].bytes, process.trace.labels[fresh[0].allocation]) == (512, "weight_copy")


def test_disabled_inside_is_disabled(process: SimulatedProcess) -> None:
    with autocast(), torch.autocast("cuda", enabled=False):
        assert torch.mm(made(8, 8), made(8, 8)).dtype == torch.float32


@pytest.mark.parametrize(("version", "dtype"), [((2, 11), HALF), ((2, 12), torch.float32)])
def test_rms_norm_joined_the_fp32_list_in_2_12(version: tuple[int, int], dtype: torch.dtype) -> None:
    with (
        SimulatedProcess("NVIDIA H200", 1 << 37, Processor((9, 0), 132, version), allocation_rules()).open(),
        autocast(),
    ):
        assert F.rms_norm(made(8, 8, dtype=HALF), (8,), made(8, dtype=HALF)).dtype == dtype


def test_no_function_is_on_two_lists() -> None:
    names = [*LOWER_PRECISION, *FP32, *FP32_BY_DTYPE, *PROMOTE]
    assert len(names) == len(set(names))
