"""Groups, FLOP and bytes of single calls."""

from __future__ import annotations

import pytest
import torch
from anatomy_by_hand import array, call, product

from trainatomy.operators.groups import _table, group_of, plain_name, rule_of
from trainatomy.operators.work import in_memory, work_of

OF_LIBRARIES = {"optimizer_update_32bit", "optimizer_update_8bit_blockwise"}
N = 64 * 32


def test_every_name_is_an_operator() -> None:
    """Of some version between 2.9 and today's; the plain name, its list form or its in-place form."""
    rules, nothing = _table()
    unknown = [
        name
        for name in (*rules, *nothing)
        if name not in OF_LIBRARIES
        and not any(hasattr(torch.ops.aten, form) for form in (name, f"{name}_", f"_foreach_{name}"))
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("aten::mul_", "mul"),
        ("aten::_foreach_mul_", "mul"),
        ("aten::_fused_adamw_", "_fused_adamw"),
        ("aten::__and__", "__and__"),
        ("aten::native_layer_norm", "native_layer_norm"),
        ("bitsandbytes::optimizer_update_32bit", "optimizer_update_32bit"),
    ],
)
def test_forms_of_a_name(name: str, plain: str) -> None:
    assert plain_name(name) == plain
    assert group_of(name) is not None


def test_scratch_belongs_to_its_operator() -> None:
    assert group_of("aten::mm (scratch)") == "contraction"
    assert group_of("copy to device") is None


def test_a_product() -> None:
    work = work_of(product(8, 16, 32))
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
    work = work_of(call(name, [array(64, 32)], [array(64, 32, storage=1)]))
    assert (work.group, work.flop, work.bytes) == (group, flop * N, 2 * 2 * N)


def test_a_reduction_counts_what_goes_in() -> None:
    work = work_of(call("sum", [array(64, 32)], [array(32, storage=1)]))
    assert (work.flop, work.read, work.written) == (N, 2 * N, 2 * 32)


def test_lists_count_each_tensor_of_the_first_list() -> None:
    parameters, gradients = [array(10), array(20, storage=1)], [array(10, storage=2), array(20, storage=3)]
    update = call("_foreach_add_", parameters + gradients, [], lengths=(2, 2), written=(0, 1))
    work = work_of(update)
    assert (work.flop, work.read, work.written) == (30, 2 * 60, 2 * 30)


def test_what_is_only_overwritten_is_not_read() -> None:
    there = array(64, 32)
    assert work_of(call("zero_", [there], [there], written=(0,))).read == 0
    copied = work_of(call("copy_", [there, array(64, 32, storage=1)], [there], written=(0,)))
    assert (copied.read, copied.written) == (2 * N, 2 * N)


def test_in_place_reads_and_writes() -> None:
    there = array(64, 32)
    work = work_of(call("add_", [there, array(64, 32, storage=1)], [there], written=(0,)))
    assert (work.read, work.written) == (2 * 2 * N, 2 * N)


def test_each_part_of_memory_is_read_once() -> None:
    both = work_of(call("mul", [array(64, 32), array(64, 32)], [array(64, 32, storage=1)]))
    halves = work_of(call("mul", [array(64, 32, part=0), array(64, 32, part=1)], [array(64, 32, storage=1)]))
    assert (both.read, halves.read) == (2 * N, 2 * 2 * N)


def test_a_broadcast_tensor_counts_what_lies_in_memory() -> None:
    assert in_memory(array(64, 32)._replace(strides=(0, 1))) == 2 * 32
    assert in_memory(array(0, 32)._replace(strides=(0, 1))) == 0


def test_picked_rows_are_read_not_the_table() -> None:
    table, rows = array(30_000, 32), array(64, dtype="int64", storage=1)
    work = work_of(call("embedding", [table, rows], [array(64, 32, storage=2)]))
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
    assert work_of(one).kind == kind  # type: ignore[arg-type]


def test_operators_without_an_entry_are_grouped_by_their_form() -> None:
    there, less = [array(64, 32)], [array(32, storage=1)]
    pointwise = rule_of(call("brand_new", there, [array(64, 32, storage=1)], pointwise=True))
    reduction = rule_of(call("brand_new", there, less))
    other = rule_of(call("brand_new", there, [array(64, 32, storage=1)]))
    assert pointwise is not None and reduction is not None and other is not None
    assert [(r.group, r.flop, r.general) for r in (pointwise, reduction, other)] == [
        ("elementwise", 1, True),
        ("normalisation", None, True),
        ("elementwise", None, True),
    ]


@pytest.mark.parametrize(
    ("shapes", "out"),
    [(((6, 3), (2, 3, 5)), (6, 5)), (((3, 6), (6, 5)), (2, 3, 5))],
)
def test_grouped_products_count_as_their_rows_do(shapes: tuple[tuple[int, ...], ...], out: tuple[int, ...]) -> None:
    """Six rows in two groups: 2 · 6 · 3 · 5, whichever way they are multiplied."""
    inputs = [array(*shape, storage=place) for place, shape in enumerate(shapes)]
    assert work_of(call("_grouped_mm", inputs, [array(*out, storage=2)])).flop == 2 * 6 * 3 * 5
