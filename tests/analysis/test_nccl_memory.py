"""NCCL's own memory, against what was measured and published."""

from __future__ import annotations

import pytest

from trainatomy.analysis.nccl_memory import nccl_bytes
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.links import links_of

H200, H100 = find_gpu("h200"), find_gpu("h100-sxm")
MIB, GB = 2**20, 10**9
EIGHT = tuple(range(8))


def test_two_h200_hold_what_was_measured() -> None:
    pair = {(0, 1): {"all_reduce"}}
    first_kernels = H200.context("lazy").loads_bytes["kernels"]  # loaded by the first collective in a process
    assert nccl_bytes(pair, 0, links_of(H200, 2)) + first_kernels == 932 * MIB
    assert nccl_bytes(pair, 0, links_of(H200, 2, 1, "pcie5-host")) + first_kernels == 476 * MIB


def test_a_scatter_needs_buffers_to_send_on_one_rank_and_to_receive_on_the_other() -> None:
    links = links_of(H200, 2)
    plain, scattered = {(0, 1): {"all_reduce"}}, {(0, 1): {"all_reduce", "scatter"}}
    more = [nccl_bytes(scattered, rank, links) - nccl_bytes(plain, rank, links) for rank in (0, 1)]
    assert more == [122 * MIB, 378 * MIB]


def test_eight_h100_hold_what_an_issue_of_nccl_reports() -> None:
    """Figures of github.com/NVIDIA/nccl/issues/1685; only those of all-to-all were used."""
    before = nccl_bytes({EIGHT: {"all_reduce"}}, 0, links_of(H100, 8))
    after = nccl_bytes({EIGHT: {"all_reduce", "all_to_all"}}, 0, links_of(H100, 8))
    first_kernels = H100.context("lazy").loads_bytes["kernels"]
    assert before + first_kernels == pytest.approx(1.06 * GB, rel=0.02)
    assert after + first_kernels == pytest.approx(4.34 * GB, rel=0.02)


def test_each_communicator_has_buffers_of_its_own() -> None:
    links = links_of(H200, 8, 2)
    across = tuple(range(0, 16, 8))
    sharded = {EIGHT: {"all_gather", "reduce_scatter"}}
    hybrid = {**sharded, across: {"all_reduce"}}
    assert nccl_bytes(hybrid, 0, links) > nccl_bytes(sharded, 0, links) > 0


def test_a_rank_alone_holds_nothing() -> None:
    assert nccl_bytes({(0,): {"all_reduce"}}, 0, links_of(H200, 8)) == 0
    assert nccl_bytes({EIGHT: {"all_reduce"}}, 0, None) == 0
