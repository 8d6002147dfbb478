"""Remembered results of meta kernels are those that the kernels return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.simulator.execution import MetaResults
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made.to(memory_format=torch.channels_last) if last else made


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.untyped_storage().nbytes()
    return tuple(described(item) for item in value) if isinstance(value, (tuple, list)) else value


CALLS = [
    (aten.addmm.default, lambda: (meta(64), meta(8, 32), meta(32, 64)), {}),
    (aten.native_layer_norm.default, lambda: (meta(4, 8, 32), [32], meta(32), meta(32), 1e-5), {}),
    (aten.native_dropout.default, lambda: (meta(4, 8), 0.1, True), {}),
    (aten.gelu.default, lambda: (meta(4, 8, dtype=torch.bfloat16),), {"approximate": "tanh"}),
    (aten.add.Tensor, lambda: (meta(4, 3, 8, 8, last=True), meta(1, 3, 1, 1)), {"alpha": 2}),
    (aten.sum.dim_IntList, lambda: (meta(4, 8), [0]), {"dtype": torch.float64}),
    (aten.convolution_backward.default,
     lambda: (meta(2, 8, 4, 4), meta(2, 3, 4, 4), meta(8, 3, 3, 3), [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
              [False, True, True]), {}),
    (aten.clamp_.default, lambda: (meta(4, 8), 0.0), {}),
    (aten.transpose.int, lambda: (meta(4, 8), 0, 1), {}),
]  # fmt: skip


def named(value: Any) -> str:
    """Return the part of a test's name that a parameter gives; a function's address would change with the process."""
    return "arguments" if callable(value) and not hasattr(value, "overloadpacket") else str(value)[:40]


@pytest.mark.parametrize(("func", "arguments", "keywords"), CALLS, ids=named)
def test_the_second_call_gives_what_the_kernel_gives(func: Any, arguments: Any, keywords: dict[str, Any]) -> None:
    results = MetaResults()
    expected = described(func(*arguments(), **keywords))
    for _ in range(3):
        assert described(results.run(func, arguments(), keywords)) == expected


def test_results_are_new_tensors_and_in_place_forms_return_their_tensor() -> None:
    results = MetaResults()
    x = meta(4, 8)
    made = [results.run(aten.mul.Tensor, (x, x), {}) for _ in range(3)]
    assert len({tensor.untyped_storage()._cdata for tensor in (x, *made)}) == 4
    assert all(results.run(aten.mul_.Tensor, (x, x), {}) is x for _ in range(3))


def test_the_type_of_a_number_decides() -> None:
    results, x = MetaResults(), meta(4, dtype=torch.int64)
    found = [results.run(aten.mul.Tensor, (x, number), {}).dtype for number in (2, 2.0, True, 2, 2.0)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]


def test_an_in_place_form_that_changes_the_shape_runs_each_time() -> None:
    results = MetaResults()
    for _ in range(2):
        x = meta(4, 8)
        assert results.run(aten.t_.default, (x,), {}).shape == (8, 4)


def test_a_view_is_a_view_each_time() -> None:
    results, x = MetaResults(), meta(4, 8)
    for _ in range(2):
        assert results.run(aten.view.default, (x, [32]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata


def lists(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [meta(4, 8, dtype=dtype), meta(8, dtype=dtype), meta(4, 8, dtype=dtype), meta(8, 4, dtype=dtype).t()]


LISTS = [
    (aten._foreach_sqrt.default, lambda: (lists(),), {}),
    (aten._foreach_sqrt.default, lambda: ([meta(8), meta(8, dtype=torch.int64)],), {}),
    (aten._foreach_div.ScalarList, lambda: (lists(), [1.0, 2.0, 3.0, 4.0]), {}),
    (aten._foreach_add.List, lambda: (lists(torch.bfloat16), lists()), {"alpha": 2}),
    (aten._foreach_mul.Tensor, lambda: (lists(torch.bfloat16), meta()), {}),
    (aten._foreach_norm.Scalar, lambda: (lists(torch.bfloat16), 2.0), {"dtype": torch.float32}),
    (aten._foreach_addcdiv_.ScalarList, lambda: (lists(), lists(), lists(), [1.0, 2.0, 3.0, 4.0]), {}),
    (aten._foreach_pow.ScalarAndTensor, lambda: (2.0, lists()), {}),
    (aten._foreach_copy_.default, lambda: (lists(), lists(torch.bfloat16)), {"non_blocking": True}),
    (aten._foreach_sqrt.default, lambda: ([],), {}),
]  # fmt: skip


@pytest.mark.parametrize(("func", "arguments", "keywords"), LISTS, ids=named)
def test_a_list_gives_what_the_kernel_gives(func: Any, arguments: Any, keywords: dict[str, Any]) -> None:
    try:
        expected = described(func(*arguments(), **keywords))
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as found:
            MetaResults().run(func, arguments(), keywords)
        assert str(found.value) == str(error)
        return
    assert described(MetaResults().run(func, arguments(), keywords)) == expected


def test_equal_items_of_a_list_have_memory_of_their_own() -> None:
    items = lists()
    made = MetaResults().run(aten._foreach_sqrt.default, (items,), {})
    assert len({tensor.untyped_storage()._cdata for tensor in (*items, *made)}) == 8


def test_a_list_that_does_not_match_is_refused_as_by_the_kernel() -> None:
    with pytest.raises(RuntimeError):
        MetaResults().run(aten._foreach_add_.List, (lists(), [meta(5)] * 4), {})
    with pytest.raises(RuntimeError):
        MetaResults().run(aten._foreach_add_.List, (lists(), lists()[:3]), {})


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch"])
def test_a_training_leaves_the_same_trace_without_remembered_results(
    monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    workload = Workload.from_mapping(
        {
            "model": {"class": "BertForSequenceClassification", "config": config | {"vocab_size": 1000}},
            "data": {"sequence_length": 16},
            "train": {"per_device_train_batch_size": 2, "fp16": True, "optim": optim},
        }
    )
    remembered = simulate(workload, workload.resolve_gpu())
    monkeypatch.setattr(MetaResults, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    plain = simulate(workload, workload.resolve_gpu())
    assert remembered.trace.events == plain.trace.events
    assert remembered.trace.origins == plain.trace.origins
    assert remembered.operations.operations == plain.operations.operations
    assert remembered.operations.calls == plain.operations.calls
