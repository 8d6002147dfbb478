"""Kernels of Inductor that are tried before their first launch."""

from __future__ import annotations

import pytest
import torch

from trainatomy.simulator.compiled.wrapper import Trials
from trainatomy.simulator.process import SimulatedProcess

pytest.importorskip("triton")

CACHE = 60 << 20
"""Bytes of an H200's L2 cache."""
SOURCE = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.{heuristic}(
    {hints}
    filename=__file__,
    triton_meta={{'signature': {{}}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90,
        major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32),
        'constants': {{}}}},
    inductor_meta={{'mutated_arg_names': ['in_ptr0'], 'autotune_pointwise': True, 'max_autotune': False,
        'max_autotune_pointwise': False}},
)
@triton.jit
def kernel(in_ptr0, in_ptr1, xnumel, XBLOCK : tl.constexpr):
    pass
"""
POINTWISE = SOURCE.format(heuristic="pointwise", hints="size_hints={'x': 131072},")
FOREACH = SOURCE.format(heuristic="foreach", hints="")


def tried(process: SimulatedProcess, trials: Trials, source: str, *arguments: object) -> list[int]:
    """Return the bytes that are allocated before a launch."""
    before = len(process.trace.events)
    trials.before(source, arguments)
    return [event.bytes for event in process.trace.events[before:] if event.action == "alloc"]


def test_each_setting_of_a_new_kernel_overwrites_the_cache(process: SimulatedProcess) -> None:
    trials = Trials(CACHE)
    weights = torch.empty(1000, device="cuda")
    found = tried(process, trials, POINTWISE, weights, weights, 1000)
    assert found == [CACHE, 4000, CACHE, 4000]  # copies fit below the peak only since the first setting was tried
    assert tried(process, trials, POINTWISE, weights, weights, 1000) == []


def test_what_a_kernel_overwrites_is_copied_below_the_peak(process: SimulatedProcess) -> None:
    weights = torch.empty(1000, device="cuda")
    earlier = torch.empty(1 << 20, device="cuda")
    del earlier
    assert tried(process, Trials(CACHE), POINTWISE, weights, weights, 1000) == [4000, CACHE, 4000] * 2


def test_a_kernel_with_one_setting_is_not_tried(process: SimulatedProcess) -> None:
    assert tried(process, Trials(CACHE), FOREACH) == []


def test_nothing_is_tried_where_the_cache_is_not_known(process: SimulatedProcess) -> None:
    assert tried(process, Trials(None), POINTWISE) == []
