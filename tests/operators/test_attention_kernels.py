"""Rules of attention and convolutions, compared with the sources' formulas and with traces of an H200."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Processor, Scratch

H200 = Processor((9, 0), 132, (2, 11))
A100 = Processor((8, 0), 108, (2, 11))
V100 = Processor((7, 0), 80, (2, 11))
RULES = allocation_rules()
_aten = torch.ops.aten


def heads(batch: int, number: int, length: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, H, S, D] as models make it: a view of [B, S, H, D]."""
    return torch.empty(batch, length, number, dim, dtype=dtype, device="meta").transpose(1, 2)


def plan_of(func: Any, *args: Any, processor: Processor = H200, **kwargs: Any) -> list[Out | Scratch | Free]:
    result = func(*args, **kwargs)
    flat = result if isinstance(result, tuple) else (result,)
    outputs = tuple(tensor for tensor in flat if isinstance(tensor, torch.Tensor))
    call = KernelCall(func, args, kwargs, outputs, processor)
    return list(RULES[func._schema.name](call))


def taken(func: Any, *args: Any, processor: Processor = H200, **kwargs: Any) -> list[tuple[str, int]]:
    """Return the allocations and frees of a call in order: ("out", bytes), ("take", bytes), ("give", bytes)."""
    result = func(*args, **kwargs)
    flat = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]
    sizes: dict[str, int] = {}
    stream = []
    for item in plan_of(func, *args, processor=processor, **kwargs):
        if isinstance(item, Out):
            size = flat[item.number].untyped_storage().nbytes() if item.bytes is None else item.bytes
            stream.append(("out", size))
        elif isinstance(item, Scratch):
            sizes[item.name] = item.bytes
            stream.append(("take", item.bytes))
        else:
            stream.append(("give", sizes.pop(item.name)))
    return stream


class TestTapesOfAnH200:
    """BERT-large, 16 heads of 64, 512 tokens; torch 2.11.0+cu130, cuDNN 9.19."""

    def test_fp32_forward(self) -> None:
        query, key, value = (heads(4, 16, 512, 64, torch.float32) for _ in range(3))
        stream = taken(_aten._scaled_dot_product_efficient_attention.default, query, key, value, None, True, 0.1)
        assert [size for _, size in stream if size] == [8388608, 131072]

    def test_fp32_backward(self) -> None:
        query, key, value, grad, out = (heads(4, 16, 512, 64, torch.float32) for _ in range(5))
        saved = torch.empty(4, 16, 512, device="meta")
        seed = torch.empty((), dtype=torch.int64, device="meta")
        stream = taken(
            _aten._scaled_dot_product_efficient_attention_backward.default,
            *(grad, query, key, value, None, out, saved, seed, seed, 0.1, [True, True, True, False]),
        )
        assert stream == [
            ("out", 8388608),
            ("out", 8388608),
            ("out", 8388608),
            ("take", 8388608),
            ("take", 131072),
            ("take", 131072),
            ("give", 131072),
            ("give", 8388608),
            ("take", 8396800),
            ("give", 131072),
        ]

    def test_fp16_forward(self) -> None:
        query, key, value = (heads(1, 16, 512, 64, torch.float16) for _ in range(3))
        stream = taken(_aten._scaled_dot_product_cudnn_attention.default, query, key, value, None, True, 0.1)
        assert [size for _, size in stream] == [8, 8, 1048576, 32768, 256]

    def test_fp16_backward(self) -> None:
        query, key, value, grad, out = (heads(1, 16, 512, 64, torch.float16) for _ in range(5))
        saved = torch.empty(1, 16, 512, 1, device="meta")
        seed = torch.empty((), dtype=torch.int64, device="meta")
        stream = taken(
            _aten._scaled_dot_product_cudnn_attention_backward.default,
            *(grad, query, key, value, out, saved, seed, seed, None, None, None, 512, 512, 0.1, False),
        )
        assert [size for _, size in stream] == [1048576, 1048576, 1048576, 2130176]


class TestFlash:
    def test_forward_makes_the_rng_state_twice_with_dropout(self) -> None:
        query, key, value = (heads(8, 16, 512, 64, torch.bfloat16) for _ in range(3))
        flash = _aten._scaled_dot_product_flash_attention.default
        assert [size for _, size in taken(flash, query, key, value)] == [8388608, 262144, 16, 8]
        assert [size for _, size in taken(flash, query, key, value, 0.1)] == [8388608, 262144, 16, 8, 16, 16]

    def test_few_queries_split_the_keys(self) -> None:
        """1 batch, 8 heads, 64 queries: 8 blocks for 264 slots and 16 blocks of keys; 16 parts fill most."""
        query, key, value = (heads(1, 8, length, 64, torch.float16) for length in (64, 4096, 4096))
        stream = taken(_aten._scaled_dot_product_flash_attention.default, query, key, value)
        assert ("take", 16 * 8 * 64 * 4) in stream
        assert ("take", 16 * 8 * 64 * 64 * 4) in stream

    @pytest.mark.parametrize(("dim", "rounded"), [(64, 64), (80, 96), (128, 128), (160, 160), (200, 256), (256, 256)])
    def test_backward_accumulates_in_fp32(self, dim: int, rounded: int) -> None:
        query, out, grad = (heads(2, 8, 100, dim, torch.bfloat16) for _ in range(3))
        key, value = (heads(2, 2, 100, dim, torch.bfloat16) for _ in range(2))
        saved, rng = torch.empty(2, 8, 100, device="meta"), torch.empty(2, device="meta", dtype=torch.uint64)
        args = (grad, query, key, value, out, saved, None, None, 100, 100, 0.0, True, rng, rng)
        stream = taken(_aten._scaled_dot_product_flash_attention_backward.default, *args)
        rows = 2 * 8 * 128 * 4
        expanded = 2 * 100 * 8 * dim * 2
        assert stream[3:] == [("take", rows), ("take", rows * rounded), ("take", expanded), ("take", expanded)]

    def test_deterministic_backward_has_an_accumulator_for_each_split(self) -> None:
        """16 heads on 132 multiprocessors: 9 accumulators."""
        query = heads(1, 16, 128, 64, torch.bfloat16)
        saved, rng = torch.empty(1, 16, 128, device="meta"), torch.empty(2, device="meta", dtype=torch.uint64)
        args = (query, query, query, query, query, saved, None, None, 128, 128, 0.0, True, rng, rng)
        torch.use_deterministic_algorithms(True)
        try:
            stream = taken(_aten._scaled_dot_product_flash_attention_backward.default, *args)
        finally:
            torch.use_deterministic_algorithms(False)
        assert stream[-1] == ("take", 9 * 16 * 128 * 64 * 4)

    def test_backward_copies_gradients_that_are_not_dense(self) -> None:
        query, key, value = (heads(2, 8, 128, 64, torch.bfloat16) for _ in range(3))
        grad = torch.empty(2, 8, 128, 64, dtype=torch.bfloat16, device="meta")
        saved, rng = torch.empty(2, 8, 128, device="meta"), torch.empty(2, device="meta", dtype=torch.uint64)
        args = (grad, query, key, value, query, saved, None, None, 128, 128, 0.0, True, rng, rng)
        stream = taken(_aten._scaled_dot_product_flash_attention_backward.default, *args)
        assert stream[0] == ("take", 2 * 8 * 128 * 64 * 2)
        assert [kind for kind, _ in stream[1:4]] == ["out"] * 3


class TestEfficient:
    def test_wide_16_bit_heads_accumulate_in_fp32(self) -> None:
        forward = _aten._scaled_dot_product_efficient_attention.default
        narrow = [heads(1, 4, 64, 128, torch.float16) for _ in range(3)]
        wide = [heads(1, 4, 64, 160, torch.float16) for _ in range(3)]
        assert ("take", 4 * 64 * 160 * 4) in taken(forward, *wide, None, True)
        assert not [kind for kind, _ in taken(forward, *narrow, None, True) if kind == "take"]

    def test_inference_saves_no_logsumexp(self) -> None:
        query = heads(1, 4, 64, 64, torch.float32)
        stream = taken(_aten._scaled_dot_product_efficient_attention.default, query, query, query, None, False)
        assert [size for _, size in stream if size] == [4 * 64 * 64 * 4]

    @pytest.mark.parametrize(
        ("processor", "dtype", "dim", "expected"),
        [
            # 16 bits, 64: tiles of 64 x 64 with a header of 16 bytes, gradients of keys in registers
            (A100, torch.float16, 64, 2 * 4 * (4 * (16 + 64 * 64 * 4))),
            # 16 bits, 128 on a GPU with much shared memory: one tile of 128 x 128 for 128 queries, in registers
            (A100, torch.float16, 128, 2 * 4 * (2 * (16 + 128 * 128 * 4))),
            # the same on an RTX 3090: tiles of 64 x 64, staging areas of both key gradients for each of 4 splits
            (
                Processor((8, 6), 82, (2, 11)),
                torch.float16,
                128,
                2 * 4 * (4 * 64 * (128 + 128) * 4 + 4 * 2 * (16 + 64 * 64 * 4)),
            ),
            # fp32 on an H200, 128: tiles of 128 x 64
            (H200, torch.float32, 128, 2 * 4 * (2 * 2 * (16 + 128 * 64 * 4))),
            # before compute capability 7.0 fp32 needs no staging area at all
            (Processor((6, 0), 56, (2, 9)), torch.float32, 64, 0),
        ],
    )
    def test_workspace(self, processor: Processor, dtype: torch.dtype, dim: int, expected: int) -> None:
        query, key, value, out, grad = (heads(2, 4, 256, dim, dtype) for _ in range(5))
        saved, seed = torch.empty(2, 4, 256, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
        plan = plan_of(
            _aten._scaled_dot_product_efficient_attention_backward.default,
            *(grad, query, key, value, None, out, saved, seed, seed, 0.0, [True, True, True, False]),
            processor=processor,
        )
        assert sum(item.bytes for item in plan if isinstance(item, Scratch) and item.name == "workspace") == expected

    def test_gradient_of_a_bias_is_padded(self) -> None:
        query, key, value, out, grad = (heads(2, 4, 100, 64, torch.float16) for _ in range(5))
        bias = torch.empty(2, 4, 100, 104, dtype=torch.float16, device="meta")[..., :100]
        saved, seed = torch.empty(2, 4, 128, device="meta"), torch.empty((), dtype=torch.int64, device="meta")
        args = (grad, query, key, value, bias, out, saved, seed, seed, 0.0, [True, True, True, True])
        stream = taken(_aten._scaled_dot_product_efficient_attention_backward.default, *args)
        assert stream[3] == ("out", 2 * 4 * 100 * 112 * 2)


def test_safe_softmax_allocates_its_masks() -> None:
    scores = torch.empty(2, 4, 16, 32, device="meta")
    stream = taken(_aten._safe_softmax.default, scores, -1)
    assert stream == [("out", 2 * 4 * 16 * 32 * 4), ("take", 2 * 4 * 16 * 32), ("take", 2 * 4 * 16), ("take", 4)]
