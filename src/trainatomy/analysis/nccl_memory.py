"""Memory that NCCL holds on a GPU outside PyTorch's allocator: kernels, and buffers of each communicator.

A communicator has channels, and a channel has a connection to each neighbour of its ring, with buffers for each
protocol.  NCCL connects what a collective needs when it is first used: rings, the switch's multicast buffers (NVLS),
and every peer for all-to-all, sends and receives.  The sizes are in ``catalog/links.yaml`` (``memory``).

The group of all ranks is counted whether or not the training step uses it: launchers, the Trainer and nearly every
script call a barrier or average the loss over all ranks.

Not modelled: communicators that share buffers (``ncclCommSplit`` with shared resources), and registered user buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.links import Link, Links
from trainatomy.results.plan import Communicators, GroupUse

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
