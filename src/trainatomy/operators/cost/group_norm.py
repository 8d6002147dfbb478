"""Group norm: a block of threads for each group of an image, however large it is, then an elementwise kernel.

One group over all channels thus keeps as few multiprocessors busy as there are images.  A block that has a
multiprocessor for itself waits for each number: less where the kernel before has left the input in the L2 cache, which
a cast, as under autocast, does more often than an activation, because it reads half as many bytes.
Blocks that share a multiprocessor wait at the same time, and its divisions bound them.  The gradient has a block for
each channel of an image (a warp where the channel is small), three small kernels, and an elementwise one.

Source: aten/src/ATen/native/cuda/group_norm_kernel.cu (``RowwiseMomentsCUDAKernel``,
``ComputeInternalGradientsCUDAKernel``).  Constants: ``catalog/efficiency.yaml``.
"""

from __future__ import annotations

from math import ceil, hypot, log2
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import NOTHING, Chip, KernelWork, moving_seconds, name_of, number, passes_to
from trainatomy.results.operations import CAST_FROM, Call

_WIDE = 512
"""Numbers from which on a block has 512 threads instead of one warp."""
_HELD = {"block": 4, "warp": 32}
"""Blocks that a multiprocessor holds."""


def group_norm(call: Call, chip: Chip) -> KernelWork:
    """Return the work of ``native_group_norm`` or its backward, [N, C, places...]."""
    backward = name_of(call).endswith("backward")
    x = call.inputs[1 if backward else 0]
    if not x.elements or len(x.shape) < 2:
        return NOTHING
    form: dict[str, Any] = read_yaml("efficiency.yaml")["group_norm"]
    images, channels = x.shape[:2]
    blocks = images * (channels if backward else max(int(number(call, "group", "1")), 1))
    length = x.elements / blocks
    size = "block" if length >= _WIDE else "warp"
    read = (2 if backward else 1) * x.bytes
    if backward or size == "warp":
        start, each = form["backward" if backward else "forward"][size]
        rounds = max(blocks / (_HELD[size] * chip.multiprocessors), 1.0)
        computing = rounds * (start + length * each)
    else:
        since = x.bytes + x.elements * int(number(call, CAST_FROM, str(x.itemsize)))
        computing = _moments_seconds(blocks, length, since, chip, form["forward"]["block"])
    statistics = max(computing, moving_seconds(read, read, form["bandwidth"], chip))
    moved = 2 * read + x.bytes
    kernels = form["kernel_seconds"] * (4 if backward else 2)
    seconds = statistics + kernels + moving_seconds(read + x.bytes, x.bytes, form["bandwidth"], chip)
    family = f"normalisation.{name_of(call)}.{8 * x.itemsize}"
    features = (log2(moved / chip.l2_bytes), log2(length) / 2, log2(blocks) / 2)
    passes = passes_to(call, moved, "a second read, to normalise")
    return KernelWork(family, features, bytes=moved, launches=5 if backward else 3, seconds=seconds, passes=passes)


def _moments_seconds(blocks: int, length: float, since: int, chip: Chip, form: dict[str, Any]) -> float:
    """Return the time of the mean and the variance of each group, by the multiprocessor that has the most blocks.

    Args:
        blocks: Groups of all images.
        length: Numbers of a group.
        since: Bytes that the kernel before has read and written, the input among them.
        chip: The GPU.
        form: The constants.
    """
    kept, gone = form["missed"]
    missed = min(max((since / chip.l2_bytes - kept) / (gone - kept), 0.0), 1.0)
    waiting = form["cached"] + missed * (form["from_memory"] - form["cached"])
    turns = ceil(blocks / chip.multiprocessors)
    held = min(turns, _HELD["block"])
    number_seconds = hypot(waiting, held * form["crowded"])
    return float(turns / held * (form["start_seconds"] + held * form["further_seconds"] + length * number_seconds))
