"""Groups, FLOP and bytes of single calls."""

from __future__ import annotations

import pytest
import torch
from operations_by_hand import array, call, product

from trainatomy.operators.counts import count
from trainatomy.operators.registry import find, group_of, operator_of
from trainatomy.operators.table import OPERATORS
from trainatomy.operators.traffic import in_memory

N = 64 * 32


def test_every_name_is_an_operator() -> None:
    """Check that the plain, list or in-place form exists in some version from 2.9 on."""
    unknown = [
        name
        for name in OPERATORS
        if "::" not in name
        and not any(hasattr(torch.ops.aten, form) for form in (name, f"{name}_", f"_foreach_{name}"))
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("aten::mul_", "mul"),
        ("aten::_foreach_mul_", "mul"),
        ("aten::_fused_adamw_", "_fused_adamw_"),
        ("aten::__and__", "__and__"),
        ("aten::native_layer_norm", "native_layer_norm"),
        ("bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_32bit"),
    ],
)
def test_forms_of_a_name(name: str, plain: str) -> None:
    operator = find(name)
    assert operator is not None and operator.name.removeprefix("_foreach_") == plain
    assert group_of(name) is not None


def test_scratch_belongs_to_its_operator() -> None:
    assert group_of("aten::mm (scratch)") == "contraction"
    assert group_of("copy to device") is None


def test_a_product() -> None:
    work = count(product(8, 16, 32))
    assert (work.group, work.flop) == ("contraction", 2 * 8 * 16 * 32)
    assert (work.read, work.written) == (2 * (8 * 32 + 32 * 16), 2 * 8 * 16)


@pytest.mark.parametrize(
    ("name", "group", "flop"),
    [
        ("_softmax", "normalisation", 4),
        ("add", "elementwise", 1),
        ("relu", "elementwise", 0),
        ("rsqrt", "elementwise", 2),
    ],
)
def test_flop_per_element(name: str, group: str, flop: int) -> None:
    work = count(call(name, [array(64, 32)], [array(64, 32, storage=1)]))
    assert (work.group, work.flop, work.bytes) == (group, flop * N, 2 * 2 * N)


def test_a_reduction_counts_its_inputs() -> None:
    work = count(call("sum", [array(64, 32)], [array(32, storage=1)]))
    assert (work.flop, work.read, work.written) == (N, 2 * N, 2 * 32)


def test_lists_count_each_tensor_of_the_first_list() -> None:
    parameters, gradients = [array(10), array(20, storage=1)], [array(10, storage=2), array(20, storage=3)]
    update = call("_foreach_add_", parameters + gradients, [], lengths=(2, 2), written=(0, 1))
    work = count(update)
    assert (work.flop, work.read, work.written) == (30, 2 * 60, 2 * 30)


def test_overwritten_operands_are_not_read() -> None:
    there = array(64, 32)
    assert count(call("zero_", [there], [there], written=(0,))).read == 0
    copied = count(call("copy_", [there, array(64, 32, storage=1)], [there], written=(0,)))
    assert (copied.read, copied.written) == (2 * N, 2 * N)


def test_in_place_reads_and_writes() -> None:
    there = array(64, 32)
    work = count(call("add_", [there, array(64, 32, storage=1)], [there], written=(0,)))
    assert (work.read, work.written) == (2 * 2 * N, 2 * N)


def test_each_part_of_memory_is_read_once() -> None:
    both = count(call("mul", [array(64, 32), array(64, 32)], [array(64, 32, storage=1)]))
    halves = count(call("mul", [array(64, 32, part=0), array(64, 32, part=1)], [array(64, 32, storage=1)]))
    assert (both.read, halves.read) == (2 * N, 2 * 2 * N)


def test_a_broadcast_tensor_counts_what_lies_in_memory() -> None:
    assert in_memory(array(64, 32)._replace(strides=(0, 1))) == 2 * 32
    assert in_memory(array(0, 32)._replace(strides=(0, 1))) == 0


def test_picked_rows_are_read_not_the_table() -> None:
    table, rows = array(30_000, 32), array(64, dtype="int64", storage=1)
    work = count(call("embedding", [table, rows], [array(64, 32, storage=2)]))
    assert (work.read, work.written) == (2 * N + 8 * 64, 2 * N)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (call("view", [array(4)], [array(4)], is_view=True), "view"),
        (call("empty_like", [array(4)], [array(4, storage=1)]), "view"),
        (call("add", [array(4, on_host=True)], [array(4, storage=1, on_host=True)]), "host"),
        (call("_to_copy", [array(4, on_host=True)], [array(4, storage=1)]), "transfer"),
        (call("_to_copy", [array(4)], [array(4, storage=1, on_host=True)]), "transfer"),
        (call("_to_copy", [array(4)], [array(4, storage=1)]), "kernel"),
        (call("_local_scalar_dense", [array()], []), "read"),
        (call("_local_scalar_dense", [array(on_host=True)], []), "host"),
    ],
)
def test_kinds(one: object, kind: str) -> None:
    assert count(one).kind == kind  # type: ignore[arg-type]


def test_operators_without_an_entry_are_grouped_by_their_form() -> None:
    there, less = [array(64, 32)], [array(32, storage=1)]
    pointwise = operator_of(call("brand_new", there, [array(64, 32, storage=1)], pointwise=True))
    reduction = operator_of(call("brand_new", there, less))
    other = operator_of(call("brand_new", there, [array(64, 32, storage=1)]))
    assert pointwise is not None and reduction is not None and other is not None
    assert [(r.group, r.flop, r.inferred) for r in (pointwise, reduction, other)] == [
        ("elementwise", 1, True),
        ("normalisation", None, True),
        ("elementwise", None, True),
    ]


@pytest.mark.parametrize(
    ("shapes", "out"),
    [(((6, 3), (2, 3, 5)), (6, 5)), (((3, 6), (6, 5)), (2, 3, 5))],
)
def test_grouped_products_count_as_their_rows_do(shapes: tuple[tuple[int, ...], ...], out: tuple[int, ...]) -> None:
    """Check six rows in two groups: 2 · 6 · 3 · 5 FLOP for every split."""
    inputs = [array(*shape, storage=place) for place, shape in enumerate(shapes)]
    assert count(call("_grouped_mm", inputs, [array(*out, storage=2)])).flop == 2 * 6 * 3 * 5
