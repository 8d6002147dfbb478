"""The data-sheet figures of a GPU that kernel costs depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.operators.cost.kernel import Chip

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU


def chip_of(gpu: GPU, tf32: bool | None) -> Chip:
    """Return the data-sheet figures of a GPU that the cost of a kernel depends on; ``tf32`` as in ``cost_model_of``."""
    return Chip(
        gpu.capability,
        gpu.multiprocessors,
        gpu.bandwidth_bytes_per_second,
        gpu.l2_bytes or 4 * 2**20,
        gpu.rates,
        tf32=bool(tf32),
        cudnn_tf32=tf32 is not False,
        bus=gpu.links.get("nvlink_c2c") or gpu.links.get("pcie", 31.5e9),
    )
