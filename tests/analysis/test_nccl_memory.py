"""NCCL's own memory, against what was measured and published."""

from __future__ import annotations

import pytest

from trainatomy.analysis.outside_allocator import nccl_bytes, one_process_bytes
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.links import links_of
from trainatomy.results.prediction import Communicators, GroupUse

H200, H100 = find_gpu("h200"), find_gpu("h100-sxm")
MIB, GB = 2**20, 10**9
EIGHT = tuple(range(8))


FIRST_KERNELS = H200.context("lazy").loads_bytes["kernels"]  # loaded by the first collective in a process


def uses(*kinds: str, peers: tuple[int, ...] = ()) -> frozenset[GroupUse]:
    messages = {GroupUse(kind, peer) for kind in ("send", "recv") for peer in peers}
    return frozenset({GroupUse(kind) for kind in kinds} | messages)


def four(communicators: Communicators, rank: int = 0) -> int:
    """MiB on one of four H200s without NVLS."""
    return nccl_bytes(communicators, rank, links_of(H200, 4, nvls=False), 4) // MIB


@pytest.mark.parametrize("gpus", [2, 4])
def test_h200s_hold_what_was_measured(gpus: int) -> None:
    group = {tuple(range(gpus)): uses("all_reduce")}
    assert nccl_bytes(group, 0, links_of(H200, gpus, nvls=False), gpus) + FIRST_KERNELS == 932 * MIB


def test_through_host_memory_h200s_hold_what_was_measured() -> None:
    links = links_of(H200, 2, 1, "pcie5-host")
    assert nccl_bytes({(0, 1): uses("all_reduce")}, 0, links, 2) + FIRST_KERNELS == 476 * MIB


def test_each_further_group_takes_what_was_measured_on_four_h200s() -> None:
    """Differences of device memory between runs of lab/parallel/records/h200x4.jsonl."""
    everybody = four({(0, 1, 2, 3): uses("all_reduce")})
    hybrid: Communicators = {(0, 1): uses("all_gather", "reduce_scatter"), (0, 2): uses("all_reduce")}
    assert four(hybrid) - everybody == 970  # the group of all ranks is counted although the step does not use it
    only_messages = {(0, 1, 2, 3): uses("all_reduce"), (0, 1): uses("all_to_all")}
    assert four(only_messages) - everybody == pytest.approx(642, abs=2)
    with_pipeline: Communicators = {(0, 1): uses("all_reduce"), (0, 2): uses("all_reduce", peers=(2,))}
    assert four(with_pipeline) - everybody == pytest.approx(1412, abs=5)


def test_stages_in_the_middle_of_a_pipeline_have_two_neighbours() -> None:
    ends, middle = (
        four({(0, 1, 2, 3): uses("all_reduce", peers=peers)}, rank) for rank, peers in ((0, (1,)), (1, (0, 2)))
    )
    assert middle - ends == 384
    assert ends - four({(0, 1, 2, 3): uses("all_reduce")}) == 446


def test_a_scatter_needs_buffers_to_send_on_one_rank_and_to_receive_on_the_others() -> None:
    everybody = (0, 1, 2, 3)
    more = [
        four({everybody: uses("all_reduce", "scatter")}, rank) - four({everybody: uses("all_reduce")}, rank)
        for rank in (0, 1)
    ]
    assert more == [254, 382]


def test_data_parallel_holds_what_was_measured() -> None:
    assert [one_process_bytes(links_of(H200, gpus), gpus) // MIB for gpus in (2, 4)] == [771, 777]
    assert one_process_bytes(None, 1) == 0


def test_eight_h100_hold_somewhat_more_than_older_versions_did() -> None:
    """Figures of github.com/NVIDIA/nccl/issues/1685, of a version before 2.28."""
    before = nccl_bytes({EIGHT: uses("all_reduce")}, 0, links_of(H100, 8), 8)
    after = nccl_bytes({EIGHT: uses("all_reduce", "all_to_all")}, 0, links_of(H100, 8), 8)
    first_kernels = H100.context("lazy").loads_bytes["kernels"]
    assert 1.06 * GB < before + first_kernels < 1.2 * 1.06 * GB
    assert after + first_kernels == pytest.approx(4.34 * GB, rel=0.06)


def test_each_communicator_has_buffers_of_its_own() -> None:
    links = links_of(H200, 8, 2)
    across = tuple(range(0, 16, 8))
    sharded = {EIGHT: uses("all_gather", "reduce_scatter")}
    hybrid = {**sharded, across: uses("all_reduce")}
    assert nccl_bytes(hybrid, 0, links, 16) > nccl_bytes(sharded, 0, links, 16) > 0


def test_a_rank_alone_holds_nothing() -> None:
    assert nccl_bytes({(0,): uses("all_reduce")}, 0, links_of(H200, 8), 8) == 0
    assert nccl_bytes({EIGHT: uses("all_reduce")}, 0, None, 8) == 0
