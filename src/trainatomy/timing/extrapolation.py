"""What kernels reach on one card, carried over to another that nobody measured.

The ratios of a calibration hold for the card they were measured on.  On another one, three things differ besides the
rates of the data sheet:

- Products attain another share of the peak: power caps a clock, consumer cards run above the clock of their data sheet
  (``facts/efficiency.yaml``, ``attained``).
- Hopper's tensor cores show their peak to its own asynchronous instructions only.  Kernels written for Ampere
  (flash and efficient attention, products of odd layouts) reach a lower share there than on the cards before it.
- A kernel that moves data takes the time of the memory, and besides it some of the multiprocessors' own (instructions,
  conversions, waiting for what it depends on): what it took on the measured card beyond its traffic.  The faster the
  multiprocessors are beside the memory, the nearer a kernel comes to the memory's bandwidth.  A multiprocessor
  issues four instructions a clock on every card since 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import read_yaml

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU
    from trainatomy.operators.cost.work import Chip, Work

_ASYNCHRONOUS = (9, 10)
"""Major compute capabilities whose tensor cores have such instructions; consumer cards after Ada have none."""
_CORES = {(3, 7): 192, (6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
"""Cores for fp32 of a multiprocessor, by compute capability (CUDA C++ Programming Guide); 128 of the others."""
_ANCESTORS = ("attention.", "matmul.half_", "matmul.tf32_")
"""Families of kernels that were written for the cards before Hopper."""


@dataclass(frozen=True, slots=True)
class Carrying:
    """From one card to another. ``products``: seconds here over seconds there by kind of product (half, tf32, fp32),
    beyond what the data sheets say; ``older``: the same of kernels older than the measured card;
    ``fp32_attention``: of attention in fp32; ``speed``: of all multiprocessors here over there; ``bandwidth``: of the
    memory there; ``top``: the share of a bandwidth that kernels reach which do nothing but move."""

    products: Mapping[str, float] = field(default_factory=dict)
    older: float = 1.0
    fp32_attention: float = 1.0
    speed: float = 1.0
    bandwidth: float = 1.0
    top: float = 1.0

    def arithmetic(self, work: Work, seconds: float, chip: Chip) -> float:
        """Seconds of a product here, of ``seconds`` by the ratio of there; never below what its traffic takes."""
        scale = self.products.get(_kind(work), 1.0)
        if work.family.startswith("attention.fp32"):
            scale *= self.fp32_attention
        elif work.family.startswith(_ANCESTORS) and "cudnn" not in work.family:
            scale *= self.older
        least = work.bytes / (chip.bandwidth * self.top)
        return max(seconds * scale, min(seconds, least))

    def traffic(self, work: Work, seconds: float, chip: Chip) -> float:
        """Seconds that moving data takes here, of ``seconds`` by the share of the bandwidth that was reached there:
        what memory takes, and what the multiprocessors took besides it.

        Faster than memory means from the L2 cache, whose bandwidth grows with the multiprocessors; what it does not
        hold comes from memory."""
        there = seconds * chip.bandwidth / self.bandwidth
        by_memory = work.bytes / (self.bandwidth * self.top)
        if there < by_memory:
            return max(there / self.speed, max(work.bytes - chip.l2_bytes, 0) / (chip.bandwidth * self.top))
        return work.bytes / (chip.bandwidth * self.top) + (there - by_memory) / self.speed


AS_MEASURED = Carrying()
"""On the card itself."""


def carried_over(there: GPU, here: GPU) -> Carrying:
    """From the card ``there``, which was measured, to ``here``."""
    facts = read_yaml("efficiency.yaml")
    products = {}
    for kind in ("half", "tf32", "fp32"):
        measured, other = _attained(facts, there, kind), _attained(facts, here, kind)
        products[kind] = measured / other if measured and other else 1.0
    gains = there.capability[0] in _ASYNCHRONOUS and here.capability[0] not in _ASYNCHRONOUS
    older = float(facts["hopper"]["older_instructions"]) if gains else 1.0
    speed, top = _clocks(here) / _clocks(there), facts["traffic"]["bandwidth"]
    attention = _fp32_attention(there, here, older)
    return Carrying(products, older, attention, speed, there.bandwidth_bytes_per_second, top)


def _kind(work: Work) -> str:
    """Which of the attained shares bounds a product."""
    parts = work.family.split(".")
    if parts[0] == "grouped":
        return "half" if work.rate in ("fp16", "bf16") else "fp32"
    part = parts[2] if parts[0] == "convolution" else parts[1] if len(parts) > 1 else ""
    return part.partition("_")[0]


def _attained(facts: Mapping[str, Any], gpu: GPU, kind: str) -> float | None:
    """Share of the peak that the best products attain on a card; TF32's is that of 16 bits where it is not known."""
    known: Mapping[str, float] = facts["attained"].get(gpu.id, {})
    share = known.get(kind)
    return known.get("half") if share is None and kind == "tf32" else share


def attained(gpu: GPU, rate: str) -> float | None:
    """Share of the peak ``rate`` (a key of ``Card.rates``) that the best products attain on ``card``; ``None`` where
    nobody published it."""
    kinds = {"fp16": "half", "bf16": "half", "tf32": "tf32", "fp32": "fp32"}
    kind = kinds.get(rate) if rate in gpu.rates else "fp32"  # what a card lacks is computed in fp32
    if kind is None:
        return None
    return _attained(read_yaml("efficiency.yaml"), gpu, kind)


def _fp32_attention(there: GPU, here: GPU, older: float) -> float:
    """Efficient attention computes fp32 by three products in TF32 where tensor cores have it
    (aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h): their rate counts, not that of
    fp32, and what ``older`` instructions gain. Without them it gains nothing by either."""
    if "tf32" not in there.rates or "tf32" not in here.rates:
        return 1.0
    return older * (here.rates["fp32"] / there.rates["fp32"]) * (there.rates["tf32"] / here.rates["tf32"])


def _clocks(gpu: GPU) -> float:
    """Of all multiprocessors in a second; the clock follows from the peak in fp32."""
    return gpu.rates["fp32"] / (2 * _CORES.get(gpu.capability, 128))
