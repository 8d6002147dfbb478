"""Memory outside PyTorch's allocator: NCCL's, kernels' local memory, and page tables of pinned memory.

Memory that NCCL holds on a GPU outside PyTorch's allocator: kernels, and buffers of each communicator.

A communicator has channels, and a channel has a connection to each neighbour of its ring, with buffers for each
protocol.  NCCL connects what a collective needs when it is first used: rings, the switch's multicast buffers (NVLS),
and every peer for all-to-all, sends and receives.  The sizes are in ``catalog/links.yaml`` (``memory``).

The group of all ranks is counted whether or not the training step uses it: launchers, the Trainer and nearly every
script call a barrier or average the loss over all ranks.

Not modelled: communicators that share buffers (``ncclCommSplit`` with shared resources), and registered user buffers.

Local memory of kernels: what CUDA sets aside on the GPU for variables that find no register.

CUDA sets it aside for all threads that the GPU can hold, as much for each as the kernel needs that needs most, from
1 KiB on, and keeps it.  Sources: CUDA C++ Programming Guide, "Local Memory" and ``cudaLimitStackSize``.  On an H200
(driver 580.159.04, torch 2.11, 2026-11-24) the first launch of a kernel with a stack of 2,944 or 2,960 bytes raised
that limit to so much, and device memory by 496 or 500 MiB: the bytes of this formula.

Memory that the GPU's page tables take for pinned host memory, outside PyTorch's allocator.

The GPU reads pinned memory through pages of 4 KiB, each with an entry of 8 bytes (``NV_MMU_VER3_PTE__SIZE`` in
dev_mmu.h of NVIDIA's open-gpu-kernel-modules), and the driver takes memory for them in steps of 2 MiB.  Five trainings
on an H200 (driver 580.159.04, 2026-11-23) that pin 4.2 to 9.8 GiB hold 6 to 18 MiB more than their context, within
2 MiB of that; those that pin less than 0.4 GiB hold none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import GPU, threads_per_multiprocessor
from trainatomy.catalog.links import Link, Links
from trainatomy.results.prediction import Communicators, GroupUse

_SINGLE: Mapping[tuple[int, ...], int] = {}
_MESSAGES = frozenset({"all_to_all", "send", "recv", "gather", "scatter"})


def nccl_bytes(
    communicators: Communicators,
    rank: int,
    links: Links | None,
    ranks: int,
    copies: Mapping[tuple[int, ...], int] = _SINGLE,
) -> int:
    """Return the bytes that NCCL holds on the GPU of a rank.

    Args:
        communicators: What the communicators that the rank is in are used for, by their ranks.
        rank: The rank.
        links: Links between the GPUs; None: there is one GPU.
        ranks: All ranks of the training.
        copies: Number of communicators over the same ranks, where there are several, as DeepSpeed makes them.
    """
    used = {group: uses for group, uses in communicators.items() if len(group) > 1}
    if links is None or not used:
        return 0
    everybody = tuple(range(ranks))
    used[everybody] = used.get(everybody, frozenset()) | {GroupUse("barrier")}
    sizes = _sizes()
    kernels = sizes["message_kernels_bytes"] if any(_messages(uses) for uses in used.values()) else 0
    each = (copies.get(group, 1) * _communicator(group, uses, rank, links) for group, uses in used.items())
    return int(sizes["process_bytes"] + kernels + sum(each))


def one_process_bytes(links: Links | None, gpus: int) -> int:
    """Return the bytes that NCCL holds on each GPU of one process that uses several, as ``DataParallel`` does."""
    sizes = _sizes()["one_process"]
    return 0 if links is None else int(sizes["bytes"] + gpus * sizes["bytes_per_gpu"])


def nccl_source() -> str:
    """Return where the sizes come from."""
    return "buffers per channel and connection in NCCL's source; kernels and the rest as measured on H200s"


def _sizes() -> Mapping[str, Any]:
    sizes: Mapping[str, Any] = read_yaml("links.yaml")["memory"]
    return sizes


def _communicator(ranks: tuple[int, ...], uses: Collection[GroupUse], rank: int, links: Links) -> int:
    sizes, node = _sizes(), rank // links.gpus_per_node
    here = sum(each // links.gpus_per_node == node for each in ranks)
    link, crosses = links.within(here), here < len(ranks)
    on_gpu = here > 1 and link.buffers_on_gpu
    total = sizes["communicator_bytes"] + (_channels(link) * sizes["channel_bytes"] if on_gpu else 0)
    if on_gpu or crosses:
        total += _message_bytes(ranks, uses, rank)
    if len(_messages(uses)) < len(uses):
        total += _channels(link) * sizes["connection_bytes"] if on_gpu else 0
        total += sizes["multicast_bytes_per_gpu"] * here if link.multicast and here > 2 else 0
        total += sizes["network_bytes"] if crosses else 0
    return int(total)


def _channels(link: Link) -> int:
    return int(_sizes()["channels"].get(link.kind, 0))


def _messages(uses: Collection[GroupUse]) -> set[GroupUse]:
    return {use for use in uses if use.kind in _MESSAGES}


def _message_bytes(ranks: tuple[int, ...], uses: Collection[GroupUse], rank: int) -> int:
    """Return the bytes of the connections to single ranks."""
    targets, origins = set[int](), set[int]()
    for use in _messages(uses):
        to, from_ = _partners(use, ranks, rank)
        targets |= to
        origins |= from_
    return int(len(targets) * _sizes()["send_bytes"] + len(origins) * _sizes()["receive_bytes"])


def _partners(use: GroupUse, ranks: tuple[int, ...], rank: int) -> tuple[set[int], set[int]]:
    """Return the ranks that a rank sends to, and those that it receives from; the first one scatters and gathers."""
    others, root = set(ranks) - {rank}, ranks[0]
    if use.kind == "all_to_all":
        return others, others
    found = {use.peer} if use.peer is not None else others if rank == root else {root}
    sends = use.kind in ("send", "scatter" if rank == root else "gather")
    return (found, set()) if sends else (set(), found)


_DEFAULT_STACK_BYTES = 1024
"""Stack for which the context already holds memory (``cudaLimitStackSize``)."""
_STEP_BYTES = 2 << 20


def local_memory_bytes(stack_bytes: int, gpu: GPU) -> int:
    """Return the bytes beyond the context's own that kernels take whose largest stack is ``stack_bytes`` a thread."""
    more = max(stack_bytes - _DEFAULT_STACK_BYTES, 0)
    threads = gpu.multiprocessors * threads_per_multiprocessor(gpu)
    return -(-more * threads // _STEP_BYTES) * _STEP_BYTES


_PAGE_BYTES = 4096
_ENTRY_BYTES = 8


def page_table_bytes(pinned: int) -> int:
    """Return the bytes on the GPU for this many bytes of pinned host memory."""
    return pinned // _PAGE_BYTES * _ENTRY_BYTES // _STEP_BYTES * _STEP_BYTES
