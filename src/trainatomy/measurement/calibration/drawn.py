"""Calibration cases drawn by a seed: the first seed's are calibrated, the second's are predicted and compared.

``benchmarks/timing/drawn_kernels.py`` measures them; ``calibrate`` leaves them out.

A group's cases are those of ``Random(seed/group)`` in order, so that a smaller number is the beginning of a larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from trainatomy.measurement.calibration import drawn_convolutions as convolutions
from trainatomy.measurement.calibration import drawn_images as images
from trainatomy.measurement.calibration import drawn_others as others
from trainatomy.measurement.calibration import drawn_rows as rows
from trainatomy.measurement.calibration import drawn_tables as tables
from trainatomy.measurement.calibration.cases import Case

SEED, HELD_OUT_SEED = "trainatomy drawn kernels", "trainatomy drawn kernels, held out"

Draw = Callable[[Random], Case]
DRAWS: dict[str, tuple[Draw, int]] = {
    **{f"{kind} convolutions": (partial(convolutions.convolution, kind=kind), 24) for kind in convolutions.KINDS},
    "published convolutions": (partial(convolutions.convolution, kind="published"), 120),
    "long depthwise convolutions": (partial(convolutions.convolution, kind="long depthwise"), 40),
    "published 1 x 1 convolutions": (partial(convolutions.convolution, kind="published 1 x 1"), 80),
    "published first convolutions": (partial(convolutions.convolution, kind="published first"), 36),
    "other published convolutions": (partial(convolutions.convolution, kind="published others"), 120),
    "published dilated convolutions": (partial(convolutions.convolution, kind="published dilated"), 60),
    "strided groups": (partial(convolutions.convolution, kind="strided groups"), 12),
    "published groups": (partial(convolutions.convolution, kind="published groups"), 40),
    "repeated operands": (rows.repeated, 40),
    "drawn reductions": (rows.reduced, 32),
    "repeated tokens": (rows.tokens, 20),
    "added values": (rows.accumulated, 18),
    "moves": (rows.moved, 40),
    "matrices": (rows.matrices, 36),
    "batches of matrices": (rows.batches, 36),
    "large matrices": (rows.large_matrices, 24),
    "experts": (rows.experts, 12),
    "drawn norms": (images.norm, 36),
    "norms of channels-last": (images.norm_of_channels_last, 24),
    "published norms": (images.published_norm, 60),
    "quantised states": (tables.quantised_states, 18),
    "bags": (tables.bag, 18),
    "pooling": (images.pooling, 24),
    "pooling of volumes": (images.pooling_of_volumes, 16),
    "interpolation": (images.interpolation, 20),
    "enlarged images": (images.enlarged_images, 60),
    "cubic interpolation": (images.cubic_interpolation, 30),
    "activations": (images.activation, 24),
    "connections": (images.connection, 10),
    "excitations": (images.excitation, 10),
    "drawn tables": (tables.table, 16),
    "small tensors": (tables.small_tensors, 10),
    "quantised layers": (tables.quantised_layer, 16),
    "quantised weights": (tables.quantised_weight, 10),
    "recurrent layers": (tables.recurrent, 16),
    "recurrent layers of any width": (tables.recurrent_of_any_width, 30),
    "recurrent layers of usual size": (tables.recurrent_of_usual_size, 20),
    "sampling": (tables.sampling, 20),
    "sequence losses": (tables.sequence_loss, 4),
    "reordered reductions": (others.reordered, 80),
    "scans": (others.scan, 34),
    "CTC": (others.ctc, 12),
    "groups of usual width": (others.usual_groups, 130),
    "other kernels": (others.other, 120),
}
"""For each group how one case is drawn, and how many are for the shipped calibrations."""


def cases(group: str, seed: str = SEED, count: int | None = None) -> Iterator[Case]:
    """Yield the first cases of a group; ``count``: all of them by default."""
    draw, number = DRAWS[group]
    random = Random(f"{seed}/{group}")
    for _ in range(number if count is None else count):
        yield draw(random)
