"""The choice of the attention kernel by GPU, and the CUDA operators that the simulated function records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.attention import efficient_backward
from trainatomy.operators.allocation.meta import meta_kernels
from trainatomy.operators.allocation.plan import KernelCall, Plan, Processor, Scratch
from trainatomy.operators.allocation.sdpa import Attention, SdpFlags, choose_sdpa, sdpa

H200 = Processor((9, 0), 132, (2, 11))
OLD_H200 = Processor((9, 0), 132, (2, 9))
A100 = Processor((8, 0), 108, (2, 11))
RTX3090 = Processor((8, 6), 82, (2, 11))
RTX5090 = Processor((12, 0), 170, (2, 11))
B200 = Processor((10, 0), 148, (2, 11))
T4 = Processor((7, 5), 40, (2, 11))
NEW_H200, NEW_A100, NEW_B200, NEW_T4 = (replace(each, torch_version=(2, 14)) for each in (H200, A100, B200, T4))
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def heads(number: int, dtype: torch.dtype, dim: int = 64, length: int = 128) -> torch.Tensor:
    return torch.empty(2, length, number, dim, dtype=dtype, device="meta").transpose(1, 2)


def choose(processor: Processor, dtype: torch.dtype, flags: SdpFlags | None = None, **options: Any) -> str:
    dim, length = options.get("dim", 64), options.get("length", 128)
    query = heads(8, dtype, dim, length)
    key = heads(options.get("key_heads", 8), dtype, dim, options.get("key_length", length))
    call = Attention(
        query,
        key,
        torch.empty_like(key),
        options.get("mask"),
        options.get("dropout", 0.0),
        options.get("is_causal", False),
        enable_gqa=options.get("enable_gqa", options.get("key_heads", 8) != 8),
        processor=processor,
        flags=flags or SdpFlags(),
        requires_grad=options.get("requires_grad", True),
    )
    return choose_sdpa(call)


@pytest.mark.parametrize(
    ("expected", "processor", "dtype", "options"),
    [
        ("cudnn", H200, FP16, {"dropout": 0.1}),
        ("cudnn", B200, BF16, {}),
        ("flash", OLD_H200, FP16, {}),
        ("flash", Processor((9, 0), 132, (2, 10)), FP16, {}),
        ("flash", A100, BF16, {}),
        ("flash", RTX5090, BF16, {}),
        ("efficient", H200, FP32, {}),
        ("efficient", T4, FP16, {}),
        ("math", T4, BF16, {}),
        ("math", H200, FP64, {}),
        ("cudnn", H200, BF16, {"mask": torch.empty(2, 1, 128, 128, dtype=BF16, device="meta")}),
        ("efficient", A100, BF16, {"mask": torch.empty(2, 1, 128, 128, dtype=BF16, device="meta")}),
        ("efficient", H200, BF16, {"mask": torch.empty(2, 8, 128, 128, dtype=BF16, device="meta", requires_grad=True)}),
        ("math", H200, FP32, {"key_heads": 2}),
        ("cudnn", H200, BF16, {"key_heads": 2}),
        ("flash", A100, BF16, {"key_heads": 2}),
        ("math", A100, BF16, {"key_heads": 2, "mask": torch.empty(128, 128, dtype=BF16, device="meta")}),
        ("flash", A100, FP16, {"dim": 84}),
        ("flash", H200, FP16, {"dim": 84}),
        ("math", A100, FP16, {"dim": 264, "mask": torch.empty(128, 1, dtype=FP16, device="meta").expand(128, 128)}),
        ("efficient", A100, FP16, {"dim": 264}),
        ("cudnn", H200, FP16, {"dim": 256}),
        ("efficient", NEW_H200, FP32, {"key_heads": 2}),
        ("efficient", NEW_T4, FP16, {"key_heads": 2}),
        ("efficient", NEW_T4, FP16, {"key_heads": 1, "enable_gqa": False}),
        ("math", T4, FP16, {"key_heads": 1, "enable_gqa": False}),
        ("math", NEW_T4, FP16, {"key_heads": 2, "enable_gqa": False}),
        ("flash", NEW_A100, FP16, {"key_heads": 1, "enable_gqa": False}),
        ("efficient", NEW_A100, BF16, {"key_heads": 2, "mask": torch.empty(128, 128, dtype=BF16, device="meta")}),
        ("flash", NEW_H200, FP16, {"dropout": 0.1}),
        ("cudnn", NEW_H200, FP16, {"dropout": 0.125}),
        ("cudnn", NEW_B200, FP16, {"dim": 256}),
        ("flash", NEW_H200, FP16, {"dim": 192}),
        ("cudnn", NEW_H200, FP16, {"dim": 192, "requires_grad": False}),
        ("flash", B200, FP16, {"dim": 256}),
        ("flash", A100, FP16, {"dim": 224}),
        ("efficient", RTX3090, FP16, {"dim": 224}),
        ("flash", RTX3090, FP16, {"dim": 224, "requires_grad": False}),
        ("flash", RTX3090, FP16, {"dim": 256}),
        ("efficient", RTX3090, FP16, {"dim": 256, "dropout": 0.1}),
        ("math", H200, FP32, {"dim": 66}),
        ("efficient", T4, FP32, {"dim": 66}),
        ("efficient", A100, FP16, {"is_causal": True, "key_length": 256}),
        ("math", A100, FP16, {"length": 0}),
        ("flash", H200, FP16, {"key_length": 1}),
    ],
)
def test_choice(expected: str, processor: Processor, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert choose(processor, dtype, **options) == expected


def test_switches() -> None:
    flags = SdpFlags()
    assert choose(H200, FP16, replace(flags, cudnn=False)) == "flash"
    assert choose(H200, FP16, replace(flags, deterministic=True)) == "flash"
    assert choose(A100, FP16, replace(flags, flash=False)) == "efficient"
    assert choose(A100, FP16, replace(flags, flash=False, efficient=False)) == "math"
    assert choose(A100, FP16, replace(flags, flash=False, efficient=False, math=False)) == "cudnn"
    assert choose(A100, FP16, replace(flags, order=("efficient", "flash"))) == "efficient"
    with pytest.raises(SimulationError, match="no kernel"):
        choose(A100, FP64, replace(flags, math=False))


def test_flags_follow_the_context() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert SdpFlags.current() == SdpFlags(flash=False, efficient=False, cudnn=False)


class Operators(TorchDispatchMode):
    """Records the names of the operators below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def run(processor: Processor, query: torch.Tensor, key: torch.Tensor, **options: Any) -> tuple[list[str], torch.Tensor]:
    inputs = [query.requires_grad_(), key.requires_grad_(), torch.empty_like(key).requires_grad_()]
    with Operators() as seen:
        out = sdpa(Attention(*inputs, processor=processor, flags=options.pop("flags", SdpFlags()), **options))
        out.sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
    return seen.names, out


def test_cudnn_runs() -> None:
    names, out = run(H200, heads(8, FP16), heads(2, FP16), enable_gqa=True)
    assert names[0] == "_scaled_dot_product_cudnn_attention"
    assert "_scaled_dot_product_cudnn_attention_backward" in names
    assert out.transpose(1, 2).is_contiguous()


def test_flash_pads_the_heads_and_cuts_the_output() -> None:
    names, out = run(A100, heads(8, FP16, dim=84), heads(8, FP16, dim=84))
    assert names[:4] == ["constant_pad_nd"] * 3 + ["_scaled_dot_product_flash_attention"]
    assert out.shape == (2, 8, 128, 84)
    assert out.stride(-2) == 88


def test_efficient_attention_converts_a_bool_mask_to_an_aligned_one() -> None:
    mask = torch.empty(2, 1, 100, 100, dtype=torch.bool, device="meta")
    names, _ = run(A100, heads(8, BF16, length=100), heads(8, BF16, length=100), attn_mask=mask)
    forward = names[: names.index("_scaled_dot_product_efficient_attention")]
    assert [name for name in forward if name in ("where", "constant_pad_nd")] == ["where", "constant_pad_nd"]


def test_math_computes_in_fp32_and_repeats_grouped_heads() -> None:
    names, out = run(T4, heads(8, BF16), heads(2, BF16), enable_gqa=True, dropout_p=0.1, is_causal=True)
    assert out.dtype == BF16
    assert {"_to_copy", "tril", "_safe_softmax", "native_dropout", "bmm"} <= set(names)
    exact, _ = run(T4, heads(8, BF16), heads(8, BF16), flags=SdpFlags(half_precision_math=True))
    assert "_to_copy" not in exact


@pytest.mark.parametrize("is_causal", [False, True])
def test_math_is_the_function(is_causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 6, 8) for _ in range(3))
    processor = Processor((8, 0), 108, (2, 11))
    flags = SdpFlags(flash=False, efficient=False, cudnn=False)
    got = sdpa(Attention(query, key, value, is_causal=is_causal, processor=processor, flags=flags))
    torch.testing.assert_close(
        got, torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    )


@pytest.mark.parametrize(
    ("processor", "dtype", "grouped", "misses"),
    [
        (A100, FP32, True, True),
        (T4, FP16, True, True),
        (A100, FP32, False, False),
        (A100, BF16, True, False),
        (A100, FP64, True, False),
    ],
)
def test_attention_that_a_mask_would_spare_its_scores(
    processor: Processor, dtype: torch.dtype, grouped: bool, misses: bool
) -> None:
    """float64 has no fused kernel at all."""
    query, key = heads(8, dtype), heads(2 if grouped else 8, dtype)
    found: list[bool] = []
    arguments: dict[str, Any] = {"processor": processor, "flags": SdpFlags()}
    sdpa(Attention(query, key, key, enable_gqa=grouped, **arguments), lambda: found.append(True))
    assert bool(found) is misses
    repeated = heads(8, dtype)
    mask = torch.ones(2, 1, 128, 128, dtype=torch.bool, device="meta")
    sdpa(Attention(query, repeated, repeated, mask, **arguments), lambda: found.append(True))
    assert len(found) == misses


class Shapes(TorchDispatchMode):
    """The operators that run, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [one.shape for one in args if isinstance(one, torch.Tensor)]
        self.seen.append((func._schema.name.removeprefix("aten::"), shapes))
        return func(*args, **(kwargs or {}))


def test_gradients_of_grouped_keys_have_the_shape_of_the_keys() -> None:
    query = heads(8, FP32).requires_grad_()
    key, value = (heads(2, FP32).requires_grad_() for _ in range(2))
    with meta_kernels():
        out = sdpa(Attention(query, key, value, enable_gqa=True, processor=NEW_A100, flags=SdpFlags()))
        out.sum().backward()
    assert out.shape == query.shape
    assert key.grad is not None and value.grad is not None and key.grad.shape == value.grad.shape == key.shape


def test_backward_of_grouped_queries_keeps_a_gradient_for_each_query_head() -> None:
    query, key = heads(8, FP16), heads(2, FP16)
    named = [plan.name for plan in planned_backward(query, key) if isinstance(plan, Scratch)]
    alone = [plan.name for plan in planned_backward(query, heads(8, FP16)) if isinstance(plan, Scratch)]
    assert [name for name in named if name not in alone] == ["grad_k_expanded", "grad_v_expanded"]
    sizes = {plan.name: plan.bytes for plan in planned_backward(query, key) if isinstance(plan, Scratch)}
    assert sizes["grad_k_expanded"] == sizes["grad_v_expanded"] == query.nbytes


def planned_backward(query: torch.Tensor, key: torch.Tensor) -> Plan:
    seed = torch.empty((), dtype=torch.long, device="meta")
    logsumexp = torch.empty(2, 8, 128, device="meta")
    mask = [True, True, True, False]
    args = (query, query, key, key, None, query, logsumexp, seed, seed, 0.0, mask)
    with meta_kernels():
        operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
        outputs = operator(*args)[:3]
    return efficient_backward(KernelCall(operator, args, {}, outputs, NEW_T4))


@pytest.mark.parametrize(("processor", "fused"), [(A100, False), (NEW_A100, True)])
def test_attention_without_a_batch_is_fused_since_2_14(processor: Processor, fused: bool) -> None:
    query = torch.empty(8, 128, 64, dtype=FP16, device="meta", requires_grad=True)
    mask = torch.empty(128, 128, dtype=FP16, device="meta")
    with meta_kernels(), Shapes() as shapes:
        out = sdpa(Attention(query, query, query, mask, processor=processor, flags=SdpFlags()))
        out.sum().backward()
    assert out.shape == query.shape
    attention = [found for name, found in shapes.seen if name == "_scaled_dot_product_efficient_attention"]
    assert bool(attention) is fused
    if fused:
        assert attention[0][0] == (1, 8, 128, 64)
