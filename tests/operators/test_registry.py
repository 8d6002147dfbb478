"""Every operator of a recorded or simulated step has a row, and every row refers to existing things."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.operators.allocation import allocation_rules, resolve
from trainatomy.operators.cost import cost_function, kernel_work
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.operators.counts import count
from trainatomy.operators.operator import COMMUNICATION, GROUPS, Operator
from trainatomy.operators.registry import find, launch_kind, libraries_of, operator_of
from trainatomy.operators.table import OPERATORS
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Operations
from trainatomy.simulator.simulate import simulate
from trainatomy.workload.schema import Workload

PROFILES = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*.trace.json.gz"))
WITHOUT_ROW = {
    "aten::_fft_c2c": "FFTs (FNet) are timed by their traffic; nobody has measured them",
}
"""Operators without a row, with the reason."""

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
T5 = {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 64, "d_kv": 16, "vocab_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"model": {"class": "BertForSequenceClassification", "config": TINY}, "train": {"fp16": True}},
    "llama": {"model": {"class": "LlamaForCausalLM", "config": TINY}, "train": {"bf16": True, "optim": "sgd"}},
    "t5": {"model": {"class": "T5ForConditionalGeneration", "config": T5}, "train": {"optim": "adafactor"}},
}


def recorded_operators() -> Iterator[str]:
    """Yield the aten operators of the recorded profiles except those that PyTorch decomposes above autograd."""
    for path in PROFILES:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        for name in sorted({event["name"] for event in events if event.get("cat") == "cpu_op"}):
            if name.startswith("aten::") and not _is_composite(name):
                yield name


def _is_composite(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (one for one in torch._C._dispatch_get_all_op_names() if one.partition(".")[0] == name)
    return any(has(one, "CompositeImplicitAutograd") for one in names)


@pytest.fixture(scope="module", params=sorted(MODELS))
def operations(request: pytest.FixtureRequest) -> Operations:
    """Return the operations of a small model's step on an H200."""
    workload = {"data": {"sequence_length": 16}, **MODELS[request.param]}
    return simulate(Workload.from_mapping(workload), find_gpu("h200")).operations


def test_every_recorded_operator_has_a_row() -> None:
    names = set(recorded_operators())
    assert len(names) > 40
    assert {name for name in names if find(name) is None} <= WITHOUT_ROW.keys()


def test_every_operator_of_a_simulated_step_has_a_row(operations: Operations) -> None:
    assert operations.calls
    assert {call.name for call in operations.calls if find(call.name) is None} <= WITHOUT_ROW.keys()


def test_an_operator_without_a_row_is_noticed() -> None:
    assert find("aten::brand_new") is None
    assert find("aten::_foreach_brand_new_") is None
    assert find("my_library::mul") is None


def test_operators_with_a_row_are_not_listed_as_missing() -> None:
    assert [name for name in WITHOUT_ROW if find(name) is not None] == []


def test_rows_name_rules_cost_functions_and_meta_kernels_that_exist() -> None:
    """Nothing else follows these names: neither the type checker nor an editor."""
    rule, cost = {"call": "KernelCall", "return": "Plan"}, {"call": "Call", "chip": "Chip", "return": "KernelWork"}
    for operator in OPERATORS.values():
        assert not operator.allocates or resolve(operator.allocates).__annotations__ == rule, operator
        assert not operator.cost or cost_function(operator.cost).__annotations__ == cost, operator
        assert not operator.meta or callable(resolve(operator.meta)), operator


def test_rows_name_libraries_that_gpu_files_know() -> None:
    known = {library for gpu in gpus() for context in gpu.contexts.values() for library in context.loads_bytes}
    assert {library for operator in OPERATORS.values() for library in operator.loads} <= known


def test_rows_are_consistent() -> None:
    for operator in OPERATORS.values():
        assert operator.group in (None, *GROUPS, COMMUNICATION), operator
        assert operator.kernel or not (operator.cost or operator.allocates or operator.group), operator
        assert operator.why or operator.group is None, operator
        assert set(operator.workspaces) <= {"cublas", "cublaslt"}, operator


def test_in_place_and_list_forms_use_the_row_of_the_plain_form() -> None:
    plain, listed = find("aten::mul"), find("aten::_foreach_mul_")
    assert plain is not None and listed is not None
    assert find("aten::mul_") is plain
    assert (listed.group, listed.flop, listed.reads) == (plain.group, plain.flop, plain.reads)
    assert (listed.launch, listed.cost) == ("list", "lists:foreach")
    assert find("aten::__and__") is OPERATORS["__and__"]


def test_rules_cover_existing_in_place_forms() -> None:
    rules = allocation_rules()
    assert rules["aten::cumsum_"] is rules["aten::cumsum"]
    assert "aten::sum_" not in rules


def test_a_thread_of_autograd_has_a_cublas_handle_of_its_own() -> None:
    assert libraries_of("aten::mm", in_backward=False) == ("cublas",)
    assert libraries_of("aten::mm", in_backward=True) == ("cublas_backward",)
    assert libraries_of("aten::convolution_backward", in_backward=True) == ("cudnn_backward",)
    assert libraries_of("aten::add", in_backward=False) == ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm_", "matmul"),
        ("aten::_foreach_add_", "list"),
        ("my_library::flash_attention", "attention"),
        ("aten::brand_new", "pointwise"),
        ("aten::where", "pointwise"),
        ("aten::masked_fill_", "pointwise"),
        ("aten::masked_scatter", "index"),
        ("aten::cudnn_batch_norm_backward", "batch_norm"),
        ("my_library::batch_norm", "batch_norm"),
        ("aten::native_group_norm", "group_norm"),
        ("aten::native_group_norm_backward", "group_norm"),
        ("bitsandbytes::quantize_4bit", "library"),
        ("bitsandbytes::dequantize_4bit", "quantised"),
        ("bitsandbytes::gemm_4bit", "quantised"),
        ("aten::new_empty_strided", "view"),
    ],
)
def test_launch_kinds(name: str, kind: str) -> None:
    assert launch_kind(name) == kind


def test_kernel_work_is_the_compulsory_traffic_and_named_passes(operations: Operations) -> None:
    """Check that the operation breakdown and the timing model use the same byte counts."""
    chip, kernels = chip_of(find_gpu("h200"), tf32=False), 0
    for call in operations.calls:
        counts, work = count(call), kernel_work(call, chip)
        if counts.kind != "kernel" or not work.launches:
            continue
        kernels += 1
        assert counts.bytes == traffic(call).bytes
        assert work.bytes == counts.bytes + sum(size for _, size in work.passes), call
        assert all(name and size for name, size in work.passes), call
    assert kernels > 30


def test_elementwise_kernels_move_their_compulsory_traffic_alone(operations: Operations) -> None:
    chip = chip_of(find_gpu("h200"), tf32=False)
    of_kind = [call for call in operations.calls if operator_of(call).cost == "elementwise:pointwise"]
    assert of_kind
    assert not any(kernel_work(call, chip).passes for call in of_kind)


def test_fused_optimizers_do_not_write_gradients() -> None:
    row = find("aten::_fused_adamw_")
    assert row is not None and row.read_only_list == 1


def test_every_column_is_explained() -> None:
    documentation = Operator.__doc__ or ""
    assert [field.name for field in fields(Operator) if f"{field.name}: " not in documentation] == []
