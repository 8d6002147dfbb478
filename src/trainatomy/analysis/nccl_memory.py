"""Memory that NCCL holds on a GPU outside PyTorch's allocator: kernels, and buffers of each communicator.

A communicator has channels, and a channel has a connection to each neighbour of its ring, with buffers for each
protocol.  NCCL connects what a collective needs when it is first used: rings, the switch's multicast buffers (NVLS),
and every peer for all-to-all, sends and receives.  The sizes are in ``catalog/links.yaml`` (``memory``).

Not modelled: communicators that share buffers (``ncclCommSplit`` with shared resources), and registered user buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.links import Links

_SINGLE: Mapping[tuple[int, ...], int] = {}
_PEER_TO_PEER = frozenset({"all_to_all", "send", "recv", "gather", "scatter"})


def nccl_bytes(
    communicators: Mapping[tuple[int, ...], Collection[str]],
    rank: int,
    links: Links | None,
    copies: Mapping[tuple[int, ...], int] = _SINGLE,
) -> int:
    """Return the bytes that NCCL holds on the GPU of a rank.

    Args:
        communicators: Kinds of collectives by the ranks of each group that the rank is in.
        rank: The rank.
        links: Links between the GPUs; None: there is one GPU.
        copies: Number of communicators over the same ranks, where there are several, as DeepSpeed makes them.
    """
    used = {ranks: kinds for ranks, kinds in communicators.items() if len(ranks) > 1}
    if links is None or not used:
        return 0
    process: int = read_yaml("links.yaml")["memory"]["process_bytes"]
    return process + sum(
        copies.get(ranks, 1) * _communicator(ranks, kinds, rank, links) for ranks, kinds in used.items()
    )


def nccl_source() -> str:
    """Return where the sizes come from."""
    return "buffers per channel and connection in NCCL's source; kernels as measured on H200s"


def _communicator(ranks: tuple[int, ...], kinds: Collection[str], rank: int, links: Links) -> int:
    sizes: Mapping[str, Any] = read_yaml("links.yaml")["memory"]
    node = rank // links.gpus_per_node
    here = sum(each // links.gpus_per_node == node for each in ranks)
    link, crosses = links.within(here), here < len(ranks)
    peers = _peer_bytes(ranks, kinds, rank, sizes) if link.buffers_on_gpu or crosses else 0
    if not set(kinds) - _PEER_TO_PEER:
        return int(peers)
    for entry in sizes["measured"]:
        if (entry["link"], entry["ranks"]) == (link.id, len(ranks)) and not crosses:
            return int(entry["bytes"] + peers)
    rings = sizes["channels"].get(link.kind, 0) * sizes["connection_bytes"] if here > 1 and link.buffers_on_gpu else 0
    multicast = sizes["multicast_bytes_per_gpu"] * here if link.multicast and here > 2 else 0
    return int(peers + rings + multicast + sizes["network_bytes"] * crosses)


def _peer_bytes(ranks: tuple[int, ...], kinds: Collection[str], rank: int, sizes: Mapping[str, Any]) -> int:
    """Return the bytes for messages between single ranks; the first rank of a group scatters and gathers."""
    used, others, is_root = _PEER_TO_PEER & set(kinds), len(ranks) - 1, rank == ranks[0]
    if not used:
        return 0
    if "all_to_all" in used:
        return int(sizes["peer_bytes"] * others)
    sends = others * ("scatter" in used) if is_root else int("gather" in used)
    receives = others * ("gather" in used) if is_root else int("scatter" in used)
    sends, receives = max(sends, int("send" in used)), max(receives, int("recv" in used))
    return int(sizes["peer_kernels_bytes"] + sends * sizes["send_bytes"] + receives * sizes["receive_bytes"])
