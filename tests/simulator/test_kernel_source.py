"""What the source of a kernel that Inductor wrote says of its work, and what that costs."""

from __future__ import annotations

import pytest
import torch

from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.results.operations import Array, Call
from trainatomy.simulator.compiled.source import read_source

ROTATION = """
@triton_heuristics.pointwise(
    size_hints={'x': 8388608},
)
@triton.jit
def rotated(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 8388608
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x0 = (xindex % 64)
    tmp0 = tl.load(in_ptr0 + (xindex), None).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + (x0), None, eviction_policy='evict_last')
    tmp2 = tl_math.cos(tmp1)
    tmp3 = tl.full([1], 1.0, tl.float32)
    tmp4 = tmp2 * tmp3
    tmp5 = tmp0 * tmp4
    tl.store(out_ptr0 + (xindex), tmp5, None)
"""
ROWS = """
@triton_heuristics.persistent_reduction(
    size_hints={'x': 8192, 'r0_': 1024},
)
@triton.jit
def norm(in_out_ptr0, in_ptr0, in_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 8192
    r0_numel = 768
    r0_1 = r0_index
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (r0_1 + 768*x0), r0_mask, other=0.0).to(tl.float32)
    tmp1 = tmp0 * tmp0
    tmp2 = tl.broadcast_to(tmp1, [XBLOCK, R0_BLOCK])
    tmp3 = tl.sum(tmp2, 1)[:, None].to(tl.float32)
    tmp4 = tl.load(in_ptr1 + (x0), None)
    tmp5 = tmp3 + tmp4
    tmp6 = libdevice.rsqrt(tmp5)
    tmp7 = tmp0 * tmp6
    tl.store(in_out_ptr0 + (r0_1 + 768*x0), tmp7, r0_mask)
"""
LOSS = """
@triton_heuristics.reduction(
    size_hints={'x': 8192, 'r0_': 32768},
)
@triton.jit
def online(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    xnumel = 8192
    r0_numel = 32000
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 32000*x0), r0_mask, other=0.0).to(tl.float32)
        tmp2 = tl.broadcast_to(tmp0, [XBLOCK, R0_BLOCK])
        _tmp3_max_next, _tmp3_sum_next = triton_helpers.online_softmax_combine(
            _tmp3_max, _tmp3_sum, tmp2, False
        )
    tl.store(out_ptr0 + (x0), tmp3, None)
"""


def test_a_pointwise_kernel_moves_what_it_touches_of_its_arguments() -> None:
    said = read_source(ROTATION)
    assert (said.kind, said.extent(())) == ("pointwise", (8388608, 1))
    assert dict(said.instructions) == {"load": 2, "trigonometric": 1, "plain": 2}
    data, table, out = torch.empty(4, 2048, 1024), torch.empty(64), torch.empty(2, 4, 2048, 1024)
    assert said.moved_bytes((data, table, out, 8388608)) == 4 * (2 * data.numel() + 64)  # of ``out`` a half


def test_what_a_reduction_computes_for_a_row_does_not_count_for_each_element() -> None:
    said = read_source(ROWS)
    assert said.extent(()) == (8192, 768)
    assert dict(said.instructions) == {"load": 1, "plain": 3}  # both products and the sum, not the root of a row
    assert said.numbers(())["elements"] == 8192 * 1024  # a row is held as the next power of two
    data, bias, out = torch.empty(8192, 768), torch.empty(8192), torch.empty(8192, 768)
    assert said.moved_bytes((out, data, bias)) == 4 * (2 * data.numel() + 8192)


def test_a_loop_over_rows_is_read_line_by_line() -> None:
    assert dict(read_source(LOSS).instructions) == {"load": 1, "softmax": 1}


LIST = """
@triton_heuristics.foreach(
)
@triton.jit
def many(in_ptr0, in_ptr1, out_ptr0, out_ptr1):
    pid = tl.program_id(0)
    if pid < num_xblocks_0:
        xnumel = 1000
        r0_numel = 1
        tmp0 = tl.load(in_ptr0 + (x0), xmask)
        tmp1 = tmp0 + tmp0
        tmp2 = tmp1 * tmp1
        tl.store(out_ptr0 + (x0), tmp2, xmask)
    elif pid < num_xblocks_1:
        xnumel = 3000
        r0_numel = 1
        tmp3 = tl.load(in_ptr1 + (x1), xmask)
        tmp4 = tmp3 + tmp3
        tl.store(out_ptr1 + (x1), tmp4, xmask)
    else:
        pass
"""


def test_a_kernel_for_a_list_of_tensors_works_on_each_by_itself() -> None:
    said = read_source(LIST)
    arguments = (torch.empty(1000), torch.empty(3000), torch.empty(1000), torch.empty(3000))
    assert said.moved_bytes(arguments) == 4 * 2 * (1000 + 3000)
    assert said.numbers(arguments) == {"kind": "pointwise", "elements": 4000, "load": 1, "plain": 1.25}


def test_a_kernel_whose_source_says_no_sizes_has_no_elements() -> None:
    assert read_source("@triton_heuristics.foreach(\n)\n@triton.jit\ndef many(in_ptr0):\n    pass\n").extent((3,)) == (
        0,
        1,
    )


def test_sizes_that_vary_are_those_of_a_launch() -> None:
    said = read_source(ROWS.replace("    xnumel = 8192\n", "").replace("xnumel, r0_numel", "ks0, xnumel, r0_numel"))
    data, bias, out = torch.empty(8192, 768), torch.empty(8192), torch.empty(8192, 768)
    for rows in (4096, 8192):
        arguments = (out, data, bias, 512, rows, 768)
        assert said.numbers(arguments)["elements"] == rows * 1024
        assert said.moved_bytes(arguments) == 4 * (2 * rows * 768 + rows)


def seconds(**numbers: object) -> float:
    tensor = Array((4096, 4096), (4096, 1), "float32", 4, 0)
    call = Call("inductor::fused", (tensor,), (), numbers=tuple((name, str(value)) for name, value in numbers.items()))
    return kernel_work(call, chip_of(find_gpu("h200"), tf32=None)).seconds


def test_arithmetic_shows_where_it_takes_longer_than_moving() -> None:
    moving = {"kind": "pointwise", "bytes": 2**27, "elements": 2**24, "load": 1, "plain": 2}
    plain = seconds(**moving)
    assert plain == pytest.approx(2**27 / (4.8e12 * 0.94), rel=0.1)
    assert seconds(**{**moving, "kind": "reduction"}) > plain
    assert seconds(**moving, random=1) > 1.5 * plain
    assert seconds(**moving, erf=1) > plain


def test_a_kernel_without_elements_is_priced_by_its_tensors() -> None:
    tensor = Array((4096, 4096), (4096, 1), "float32", 4, 0)
    work = kernel_work(Call("inductor::fused", (tensor,), ()), chip_of(find_gpu("h200"), tf32=None))
    assert work.bytes == tensor.bytes and work.seconds == 0
