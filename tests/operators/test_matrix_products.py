"""Rules of matrix products, grouped products and recurrent layers, and the workspaces of cuBLAS."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.matmul import grouped_mm
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Processor, Scratch
from trainatomy.operators.allocation.recurrent import Recurrence, _scalars, recurrent
from trainatomy.operators.allocation.workspaces import WorkspaceTracker, product_of

H200 = Processor((9, 0), 132, (2, 11))
V100 = Processor((7, 0), 80, (2, 11))
RULES = allocation_rules()
_aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(func: Any, *args: Any, processor: Processor = H200) -> list[Out | Scratch | Free]:
    result = func(*args)
    flat = result if isinstance(result, tuple) else (result,)
    outputs = tuple(tensor for tensor in flat if isinstance(tensor, torch.Tensor))
    return list(RULES[func._schema.name](KernelCall(func, args, {}, outputs, processor)))


def copies(func: Any, *args: Any) -> list[int]:
    return [item.bytes for item in plan_of(func, *args) if isinstance(item, Scratch)]


class TestOperandsOfCublas:
    def test_rows_columns_and_slices_are_used_without_a_copy(self) -> None:
        assert not copies(_aten.mm.default, meta(8, 16), meta(16, 4))
        assert not copies(_aten.mm.default, meta(16, 8).t(), meta(4, 16).t())
        assert not copies(_aten.mm.default, meta(8, 32)[:, :16], meta(16, 4))
        assert not copies(_aten.addmm.default, meta(4), meta(8, 16), meta(4, 16).t())

    def test_broadcast_and_strided_operands_are_copied(self) -> None:
        expanded = meta(1, 1).expand(8, 16)
        assert copies(_aten.mm.default, expanded, meta(16, 4)) == [8 * 16 * 4]
        assert copies(_aten.mm.default, expanded, meta(16, 8)[:, ::2]) == [16 * 4 * 4, 8 * 16 * 4]
        assert copies(_aten.addmm.default, meta(4), expanded, meta(16, 4)) == [8 * 16 * 4]

    def test_batches(self) -> None:
        heads = meta(2, 32, 4, 16).permute(0, 2, 1, 3).reshape(8, 32, 16)
        assert not copies(_aten.bmm.default, heads, heads.transpose(1, 2))
        assert not copies(_aten.bmm.default, meta(2, 32, 64)[:, :, :16], meta(2, 16, 8))
        assert copies(_aten.bmm.default, meta(2, 32, 64)[:, :, ::4], meta(2, 16, 8)) == [2 * 32 * 16 * 4]
        assert copies(_aten.bmm.default, meta(1, 1, 1).expand(2, 32, 16), meta(2, 16, 8)) == [2 * 32 * 16 * 4]
        assert not copies(_aten.bmm.default, meta(2, 32, 16), meta(2, 16, 1))
        assert not copies(_aten.bmm.default, meta(1, 32, 16).expand(2, 32, 16), meta(2, 16, 8))


class TestWorkspaces:
    def test_workspaces_of_an_h200_match_its_traces(self) -> None:
        """32 MiB for each thread, and 1 MiB more at a thread's first product with a bias (torch 2.11)."""
        workspaces = WorkspaceTracker(H200)
        assert workspaces.before("aten::add", "forward") == []
        assert [each.bytes for each in workspaces.before("aten::addmm", "forward")] == [33554432, 1048576]
        assert workspaces.before("aten::addmm", "forward") == []
        assert [each.bytes for each in workspaces.before("aten::mm", "backward")] == [33554432]
        assert [each.bytes for each in workspaces("aten::addmm", True)] == [1048576]

    def test_a_matrix_as_bias_takes_none_of_cublaslt(self) -> None:
        """Three LoRA trainings with TRL on an H200 held 1 MiB less than with one (torch 2.11)."""
        matrix, vector = meta(4, 8), meta(8)
        assert [product_of(name, [matrix]) for name in ("aten::addmm", "aten::addmm_")] == ["aten::mm"] * 2
        assert product_of("aten::addmm", [vector]) == "aten::addmm"
        assert product_of("aten::baddbmm", [matrix]) == "aten::baddbmm"

    def test_each_call_takes_its_own_since_torch_2_15(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A product with a bias takes the workspace of cuBLASLt, which computes it, another that of cuBLAS."""
        processor = Processor((9, 0), 132, (2, 15))
        workspaces = WorkspaceTracker(processor)
        for _ in range(2):
            (taken,) = workspaces.before("aten::mm", "forward")
            assert (taken.bytes, taken.is_kept) == (33554432, False)
        (taken,) = workspaces.before("aten::addmm", "forward")
        assert (taken.bytes, taken.is_kept) == (1048576, False)
        monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
        kept = WorkspaceTracker(processor)
        assert [each.is_kept for each in kept.before("aten::addmm", "forward")] == [True]
        assert kept.before("aten::addmm", "forward") == []

    def test_shared_since_torch_2_12(self) -> None:
        workspaces = WorkspaceTracker(Processor((8, 0), 108, (2, 12)))
        assert [each.bytes for each in workspaces.before("aten::addmm", "forward")] == [8519680]


class TestGroupedProducts:
    def test_arguments_and_tensor_maps_on_hopper(self) -> None:
        """3 pointers, strides and dimensions for 8 groups; 4 descriptors per multiprocessor, 5 for large groups.

        A descriptor has 128 bytes.
        """
        data, weight = meta(64, 32, dtype=torch.bfloat16), meta(8, 48, 32, dtype=torch.bfloat16)
        offsets = meta(8, dtype=torch.int32)
        plan = plan_of(_aten._grouped_mm.default, data, weight.transpose(1, 2), offsets)
        assert [item.bytes for item in plan if isinstance(item, Scratch)] == [8 * (24 + 12 + 24), 4 * 128 * 132]
        many, wide = meta(2048, 32, dtype=torch.bfloat16), meta(8, 32, 256, dtype=torch.bfloat16)
        assert copies(_aten._grouped_mm.default, many, wide, offsets)[-1] == 5 * 128 * 132
        ampere = plan_of(
            _aten._grouped_mm.default, data, weight.transpose(1, 2), offsets, processor=Processor((8, 0), 108, (2, 11))
        )
        assert ampere == [Out(0)]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_any_type_is_multiplied(self, dtype: torch.dtype) -> None:
        data = meta(64, 32, dtype=dtype).requires_grad_()
        weight = meta(8, 48, 32, dtype=dtype).requires_grad_()
        out = grouped_mm(data, weight.transpose(1, 2), offs=meta(8, dtype=torch.int32))
        out.backward(torch.empty_like(out))
        assert out.shape == (64, 48)
        assert data.grad is not None
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride()


class TestConvolutions:
    def args(self, data: torch.Tensor, weight: torch.Tensor, groups: int = 1) -> tuple[Any, ...]:
        return (data, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)

    def test_contiguous_tensors_are_transformed(self) -> None:
        data, weight = meta(2, 16, 8, 8, dtype=torch.float16), meta(32, 16, 3, 3, dtype=torch.float16)
        assert copies(_aten.convolution.default, *self.args(data, weight)) == [2 * (2048 + 4608 + 4096) + 16]
        double = (data.double(), weight.double())
        assert not copies(_aten.convolution.default, *self.args(*double))

    def test_channels_last_needs_nothing_but_the_weights_in_that_format(self) -> None:
        data, weight = meta(2, 16, 8, 8).to(memory_format=torch.channels_last), meta(32, 16, 3, 3)
        assert copies(_aten.convolution.default, *self.args(data, weight)) == [4608 * 4]

    def test_no_tensor_cores_no_transform(self) -> None:
        args = self.args(meta(2, 16, 8, 8), meta(32, 16, 3, 3))
        assert plan_of(_aten.convolution.default, *args, processor=V100) == [Out(0)]

    def test_backward_computes_only_the_requested_gradients(self) -> None:
        data, weight, grad = meta(2, 16, 8, 8), meta(32, 16, 3, 3), meta(2, 32, 8, 8)
        args = (grad, data, weight, [32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        both = plan_of(_aten.convolution_backward.default, *args, [True, True, True], processor=V100)
        assert [item.number for item in both if isinstance(item, Out)] == [0, 1, 2]
        frozen = plan_of(_aten.convolution_backward.default, *args, [False, True, False], processor=V100)
        assert frozen == [Out(0)]


def test_recurrent_layers_are_one_step_for_autograd() -> None:
    module = torch.nn.LSTM(24, 32, num_layers=2, batch_first=True, bidirectional=True, device="meta")
    data = meta(3, 10, 24).requires_grad_()
    hidden = (meta(4, 3, 32), meta(4, 3, 32))
    layer = Recurrence("LSTM", 2, 0.0, True, True, True)
    output, state, cell = recurrent(layer, data, hidden, module._flat_weights)
    output.sum().backward()
    assert output.shape == (3, 10, 64)
    assert state.shape == cell.shape == (4, 3, 32)
    assert data.grad is not None
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in module.parameters())
    storages = {weight.grad.untyped_storage()._cdata for weight in module.parameters() if weight.grad is not None}
    assert len(storages) == 1


def test_recurrent_layers_say_that_dropout_is_between_them_only_where_it_drops() -> None:
    evaluated, trained = (_scalars(Recurrence("LSTM", 2, 0.3, train, False, True)) for train in (False, True))
    assert trained == {**evaluated, "dropout": 0.3}
    assert "dropout" not in evaluated
