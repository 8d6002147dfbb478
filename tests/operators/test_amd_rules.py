"""Rules of PyTorch's build for AMD GPUs, by the formulas of its source (torch 2.13, AOTriton 0.12)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Processor, Scratch
from trainatomy.operators.allocation.sdpa import Attention, SdpFlags, choose_sdpa
from trainatomy.operators.allocation.workspaces import WorkspaceTracker

aten = torch.ops.aten
RULES = allocation_rules()
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
MIB = 2**20


def amd(architecture: str, capability: tuple[int, int] = (9, 4), multiprocessors: int = 304) -> Processor:
    return Processor(capability, multiprocessors, (2, 13), architecture=architecture)


MI300X, MI210 = amd("gfx942"), amd("gfx90a", (9, 0), 104)
RX7900, RX7800, RX9070 = amd("gfx1100", (11, 0), 48), amd("gfx1101", (11, 0), 30), amd("gfx1201", (12, 0), 32)
A100 = Processor((8, 0), 108, (2, 13))


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(batch: int, number: int, length: int, dim: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return [B, H, S, D] as models make it: a view of [B, S, H, D]."""
    return meta(batch, length, number, dim, dtype=dtype).transpose(1, 2)


def plan(operator: Any, *args: Any, processor: Processor = MI300X, **kwargs: Any) -> Plan:
    results = operator(*args, **kwargs)
    outputs = tuple(leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor))
    return RULES[operator._schema.name](KernelCall(operator, args, kwargs, outputs, processor))


def scratch(steps: Plan) -> list[int]:
    return [step.bytes for step in steps if isinstance(step, Scratch)]


class TestReductions:
    """``setReduceConfig`` with ``USE_ROCM``: warps of 64, at least 128 values a thread and 64 blocks a result."""

    def test_blocks_are_as_wide_as_a_warp_and_at_least_64_share_a_result(self) -> None:
        # 256 columns of 4 in blocks of 64 × 2: 1024 values a thread; ⌈1024/128⌉ = 8 blocks are made 64.
        assert scratch(plan(aten.sum.dim_IntList, meta(2048, 1024), [0], True)) == [4 * 1024 * 64 * 64 * 4, 4 * 4]

    def test_a_radeon_has_warps_of_32(self) -> None:
        # blocks of 32 × 4: 512 values a thread, 4 blocks made 64, and 8 of them side by side
        steps = plan(aten.sum.dim_IntList, meta(2048, 1024), [0], True, processor=RX7900)
        assert scratch(steps) == [4 * 1024 * 64 * 32 * 4, 4 * 8]

    def test_a_thread_is_left_128_values(self) -> None:
        # 2**26 numbers by 512 threads: 131,072 values a thread, ⌈131072/128⌉ = 1024 < 304 · 4 blocks
        assert scratch(plan(aten.sum.default, meta(2**26))) == [4 * 1024, 4]
        assert scratch(plan(aten.sum.default, meta(2**26), processor=A100)) == [4 * 512, 4]  # ⌈131072/256⌉ > 108 · 4


def test_the_gradients_of_a_layer_norm_are_summed_in_blocks_as_wide_as_a_warp() -> None:
    rows, columns = 65_536 + 1, 2048
    data, statistics = meta(rows, columns, dtype=BF16), meta(rows, 1)
    weight = meta(columns, dtype=BF16)
    arguments = (data, data, [columns], statistics, statistics, weight, weight, [True, True, True])
    sums = [
        step
        for step in plan(aten.native_layer_norm_backward.default, *arguments)
        if isinstance(step, Scratch) and "partial" in step.name
    ]
    parts = min(-(-rows // 32), 32 * 1024 // (columns // 64))  # 32 columns a block, as on NVIDIA's, would leave 512
    assert [one.bytes for one in sums] == [parts * columns * 2] * 2


class TestAttention:
    """AOTriton's kernels."""

    def forward(self, *tensors: torch.Tensor, causal: bool = True, dropout: float = 0.0) -> Plan:
        return plan(aten._scaled_dot_product_flash_attention.default, *tensors, dropout, causal)

    def backward(self, query: torch.Tensor, key: torch.Tensor, *, causal: bool = True, dropout: float = 0.0) -> Plan:
        batch, number, length, _ = query.shape
        lse = meta(batch, number, length)
        return plan(
            aten._scaled_dot_product_flash_attention_backward.default,
            *(query, query, key, key, query, lse, None, None, length, key.shape[2], dropout, causal),
            *(meta(2, dtype=torch.uint64), meta(dtype=torch.uint64)),
        )

    def test_a_causal_mask_takes_a_counter(self) -> None:
        query = heads(2, 8, 512, 64)
        assert list(self.forward(query, query, query)) == [Out(0), Out(2), Out(3), Out(1), Scratch(4, "counter")]
        assert list(self.forward(query, query, query, causal=False)) == [Out(0), Out(2), Out(3), Out(1)]

    def test_short_sequences_have_one_kernel_for_all_gradients(self) -> None:
        query = heads(2, 8, 1024, 128)
        assert list(self.backward(query, query)) == [Out(0), Out(1), Out(2), Scratch(2 * 8 * 1024 * 4, "softmax_d")]

    def test_longer_ones_take_a_number_for_each_row(self) -> None:
        query, key = heads(2, 8, 4096, 128), heads(2, 2, 4096, 128)
        rows = 2 * 8 * 4096 * 4
        assert scratch(self.backward(query, key)) == [rows, rows]  # grouped queries: no gradients for all heads
        assert scratch(self.backward(query, query, dropout=0.1)) == [rows, rows]

    def test_aiter_accumulates_the_gradient_of_queries_in_fp32(self) -> None:
        query = heads(2, 8, 4096, 128)
        rows = 2 * 8 * 4096 * 4
        assert scratch(self.backward(query, query)) == [rows, rows * 128, rows]

    def test_the_efficient_kernel_makes_its_result_twice_and_saves_no_padding(self) -> None:
        query = heads(2, 8, 100, 64, FP32)
        operator = aten._scaled_dot_product_efficient_attention.default
        size = 2 * 8 * 100 * 64 * 4
        assert list(plan(operator, query, query, query, None, True, 0.0, False)) == [
            *(Out(2, 0), Out(3, 0)),
            *(Scratch(size, "first result"), Out(0), Free("first result")),
            Out(1, 2 * 8 * 100 * 4),
        ]
        with_dropout = plan(operator, query, query, query, None, True, 0.1, True)
        assert list(with_dropout)[:2] == [Out(2, 8), Out(3, 8)]  # on the GPU
        assert list(with_dropout)[-1] == Scratch(4, "counter")


def choose(processor: Processor, dtype: torch.dtype = BF16, dim: int = 64, **options: Any) -> str:
    query, key = heads(2, 8, 128, dim, dtype), heads(2, options.pop("key_heads", 8), 128, dim, dtype)
    options["enable_gqa"] = key.shape[1] != 8
    return choose_sdpa(Attention(query, key, key, processor=processor, flags=SdpFlags(), requires_grad=True, **options))


class TestChoiceOfAttention:
    """``select_sdp_backend`` with ``USE_ROCM``."""

    @pytest.mark.parametrize("processor", [MI300X, MI210, RX7900, RX9070])
    def test_sixteen_bits_take_flash_attention(self, processor: Processor) -> None:
        assert choose(processor) == choose(processor, key_heads=2) == "flash"
        assert choose(processor, FP32) == "efficient"

    def test_cudnn_is_not_there(self) -> None:
        assert choose(MI300X, FP16, attn_mask=meta(2, 8, 128, 128, dtype=FP16)) == "efficient"

    def test_heads_up_to_512(self) -> None:
        assert choose(MI300X, dim=512) == "flash"
        assert choose(MI300X, dim=520) == "math"

    def test_a_mask_has_the_type_of_the_queries(self) -> None:
        assert choose(MI300X, attn_mask=meta(2, 8, 128, 128, dtype=torch.bool)) == "efficient"
        assert choose(MI300X, attn_mask=meta(2, 8, 128, 128, dtype=FP32)) == "math"

    def test_an_experimental_architecture_has_none_unless_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert choose(RX7800) == choose(RX7800, FP32) == "math"
        monkeypatch.setenv("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1")
        assert choose(RX7800) == "flash"

    def test_composable_kernel_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_ROCM_FA_PREFER_CK", "1")
        with pytest.raises(SimulationError, match="Composable Kernel"):
            choose(MI300X)


class TestWorkspaces:
    """hipBLAS' and hipBLASLt's, of which a product takes one."""

    def taken(self, processor: Processor, *names: str) -> list[tuple[str, int]]:
        tracker = WorkspaceTracker(processor)
        return [(one.name, one.bytes) for name in names for one in tracker.before(f"aten::{name}", "forward")]

    def test_hipblaslt_computes_all_products_of_matrices_where_it_is_preferred(self) -> None:
        assert self.taken(MI300X, "mm", "addmm", "bmm") == [("hipblaslt_workspace", 76 * MIB)]
        assert self.taken(MI300X, "dot") == [("hipblas_workspace", 128 * MIB)]
        assert self.taken(MI210, "mv") == [("hipblas_workspace", 32 * MIB)]

    def test_elsewhere_only_those_with_a_bias(self) -> None:
        both = [("hipblas_workspace", 32 * MIB), ("hipblaslt_workspace", 76 * MIB)]
        assert self.taken(RX7900, "mm", "addmm") == both

    def test_the_environment_chooses_the_library_and_the_sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HIPBLASLT_WORKSPACE_SIZE", "1024")
        monkeypatch.setenv("TORCH_BLAS_PREFER_HIPBLASLT", "1")
        assert self.taken(RX7900, "mm") == [("hipblaslt_workspace", MIB)]
        monkeypatch.setenv("TORCH_BLAS_PREFER_HIPBLASLT", "0")
        monkeypatch.setenv("HIPBLAS_WORKSPACE_CONFIG", ":1024:3")
        assert self.taken(MI300X, "mm") == [("hipblas_workspace", 3 * MIB)]


def test_convolutions_have_no_workspace_that_is_known() -> None:
    data, weight = meta(8, 64, 56, 56, dtype=BF16), meta(64, 64, 3, 3, dtype=BF16)
    arguments = (data, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert list(plan(aten.convolution.default, *arguments)) == [Out(0)]
    assert scratch(plan(aten.convolution.default, *arguments, processor=A100)) != []


def test_grouped_products_are_one_for_each_group() -> None:
    first, second = meta(64, 128, dtype=BF16), meta(4, 128, 256, dtype=BF16)
    groups = meta(4, dtype=torch.int32)
    assert list(plan(aten._grouped_mm.default, first, second, groups)) == [Out(0)]


def test_what_was_not_read_is_refused_by_name() -> None:
    with pytest.raises(WorkloadError, match=r"a recurrent layer .* is not simulated on AMD GPUs"):
        MI300X.need_cuda("a recurrent layer (MIOpen)")
    A100.need_cuda("anything")
