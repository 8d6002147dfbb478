"""Apply the efficiencies measured on one GPU to another that nobody calibrated.

A calibration's efficiencies hold for the GPU it was measured on.  On another GPU four things differ besides the rates
of the data sheet:

- Matrix products attain another share of the peak: power limits lower the clock, and consumer GPUs run above the clock
  of their data sheet (``catalog/efficiency.yaml``, ``attained``).
- Fused attention takes the time of its arithmetic and besides some time of the multiprocessors (exponentials, loading,
  and the splitting of fp32 into several numbers of TF32): what it took on the calibrated GPU beyond its arithmetic.
- Hopper's tensor cores reach their peak only by asynchronous instructions. Kernels written for Ampere (flash and
  memory-efficient attention, matrix products of odd layouts) reach a lower share there than on earlier GPUs.
- A kernel that moves data takes the memory's time plus some time of the multiprocessors (instructions, conversions,
  waiting for dependencies): what it took on the calibrated GPU beyond its memory traffic.  The faster the
  multiprocessors are relative to memory, the closer a kernel comes to the memory's bandwidth.  A multiprocessor issues
  four instructions a clock on every GPU since 2017.

``source`` below is the GPU that was calibrated, ``target`` the one to predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.operators.cost.kernel import Chip, KernelWork, chip_of
from trainatomy.operators.cost.matmul import products_of

_OLDER_PRODUCTS = ("matmul.half_", "matmul.tf32_")
"""Families of matrix products whose kernels predate Hopper."""
_HALF_RATES = ("fp16", "bf16")
_KINDS = {"fp16": "half", "bf16": "half", "tf32": "tf32", "fp32": "fp32"}
"""Keys of ``Extrapolation.products`` by those of a GPU's rates."""


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Factors that translate kernel times from the calibrated GPU (source) to another (target).

    Attributes:
        source: The GPU that was calibrated; None if it is the target.
        products: Target over source time of matrix products, by kind (half, tf32, fp32), beyond the data sheets' rates.
        own_products: The same for products with constants of the target's architecture, over the GPU of those.
        older_kernels: The same for products by kernels written for GPUs older than the source, as a factor of that.
        compute_speed: Instruction rate of all multiprocessors, target over source.
        source_bandwidth: Memory bandwidth of the source, bytes per second.
        source_share: Share of the source's bandwidth that kernels reach which only move data.
        share: The same of the target.
        attained: Share of the target's peak that its fastest products attain, by kind.
    """

    source: Chip | None = None
    products: Mapping[str, float] = field(default_factory=dict)
    own_products: Mapping[str, float] = field(default_factory=dict)
    older_kernels: float = 1.0
    compute_speed: float = 1.0
    source_bandwidth: float = 1.0
    source_share: float = 1.0
    share: float = 1.0
    attained: Mapping[str, float] = field(default_factory=dict)

    def arithmetic_seconds(self, work: KernelWork, seconds: float, chip: Chip) -> float:
        """Return the time of a matrix product on the target, but no less than its memory traffic takes.

        Nor is it faster than the fastest products that were published of the target: a calibration knows no products
        as large as those of large models, and what is interpolated for these may exceed all that it measured.

        Args:
            work: The product.
            seconds: Its time by the source's efficiency and the target's data sheet.
            chip: The target.
        """
        if work.instructions is not None and _is_on_tensor_cores(work.instructions[1], chip):
            return self._attention_seconds(work, *work.instructions, seconds, chip)
        kind = _precision_kind(work)
        scale = (self.own_products if work.own_products else self.products).get(kind, 1.0)
        if work.family.startswith(_OLDER_PRODUCTS):
            scale *= self.older_kernels
        least = work.bytes / (chip.bandwidth * self.share)
        share = self.attained.get(kind) if work.family.startswith("matmul.") else None
        fastest = work.flop / (chip.rate(work.rate) * share) if share else 0.0
        return max(seconds * scale, min(seconds, least), fastest)

    def _attention_seconds(self, work: KernelWork, flop: float, cores: str, seconds: float, chip: Chip) -> float:
        """Return the time of fused attention on the target: its arithmetic, and the multiprocessors' own time.

        Args:
            work: The attention.
            flop: What it computes (``KernelWork.instructions``).
            cores: The key of the rate of the cores that do.
            seconds: Its time by the source's efficiency and the target's data sheet.
            chip: The target.
        """
        source, by_older = self.source or chip, ".cudnn" not in work.family
        on_source = seconds * chip.rate(work.rate) / source.rate(work.rate)
        reached = source.older_instructions if by_older else 1.0
        besides = max(on_source - flop / (source.rate(cores) * reached), 0.0)
        attained = self.attained.get(_KINDS[cores], 1.0)
        share = min(attained, chip.older_instructions) if by_older and chip.is_asynchronous else attained
        computing = flop / (chip.rate(cores) * share) + besides / self.compute_speed
        return max(computing, work.bytes / (chip.bandwidth * self.share))

    def traffic_seconds(self, work: KernelWork, seconds: float, chip: Chip) -> float:
        """Return the time that moving data takes on the target: memory time plus the multiprocessors' own.

        A kernel that was faster than memory on the source read from its L2 cache, whose bandwidth grows with the
        multiprocessors; what the target's cache does not hold comes from memory.

        Args:
            work: The operation.
            seconds: Its time by the share of the bandwidth reached on the source and the target's data sheet.
            chip: The target.
        """
        on_source = seconds * chip.bandwidth / self.source_bandwidth
        by_memory = work.bytes / (self.source_bandwidth * self.source_share)
        if on_source < by_memory:
            uncached = max(work.bytes - chip.l2_bytes, 0) / (chip.bandwidth * self.share)
            return max(on_source / self.compute_speed, uncached)
        return work.bytes / (chip.bandwidth * self.share) + (on_source - by_memory) / self.compute_speed


SAME_GPU = Extrapolation()
"""Scale of the calibrated GPU itself: no extrapolation."""


def extrapolation_between(source: GPU, target: GPU) -> Extrapolation:
    """Return the factors from the calibrated GPU ``source`` to ``target``."""
    facts = read_yaml("efficiency.yaml")
    there, here = chip_of(source, None), chip_of(target, None)
    products, own_products, attained = {}, {}, {}
    for kind in ("half", "tf32", "fp32"):
        measured = attained_share(facts, source, kind)
        other = attained_share(facts, target, kind) or measured  # unknown: as much as the source
        if measured and other:
            products[kind], attained[kind] = measured / other, other
        known = products_of(target.cost_capability, kind)
        share = known and attained_share(facts, find_gpu(known.gpu), kind)
        if share and other:
            own_products[kind] = share / other
    return Extrapolation(
        there,
        products,
        own_products,
        there.older_instructions / here.older_instructions,
        here.issue_rate / there.issue_rate,
        source.bandwidth_bytes_per_second,
        facts["traffic"]["bandwidth"],
        attained_share(facts, target, "bandwidth") or facts["traffic"]["bandwidth"],
        attained,
    )


def attainable_share(gpu: GPU, rate: str) -> float | None:
    """Return the share of a peak that the best matrix products attain on a GPU.

    Args:
        gpu: The GPU.
        rate: A precision, as in the keys of ``GPU.rates``.

    Returns:
        The share, or ``None`` if nobody published it.
    """
    kind = _KINDS.get(rate) if rate in gpu.rates else "fp32"  # a precision the GPU lacks is computed in fp32
    if kind is None:
        return None
    return attained_share(read_yaml("efficiency.yaml"), gpu, kind)


def _is_on_tensor_cores(cores: str, chip: Chip) -> bool:
    return cores != "fp32" and cores in chip.rates and chip.has_tensor_cores


def _precision_kind(work: KernelWork) -> str:
    """Return the key of ``Extrapolation.products`` for a product: half, tf32 or fp32."""
    parts = work.family.split(".")
    if parts[0] in ("grouped", "convolution"):
        return "half" if work.rate in _HALF_RATES else work.rate
    return parts[1].partition("_")[0] if len(parts) > 1 else ""


def attained_share(facts: Mapping[str, Any], gpu: GPU, kind: str) -> float | None:
    """Look up the share of the peak that products attain; an unknown share of TF32 is that of 16 bits.

    What is not published of a GPU is taken from its relative (``attained_like``).
    """
    name: str | None = gpu.card
    while name is not None:
        known: Mapping[str, float] = facts["attained"].get(name, {})
        share = known.get(kind, known.get("half") if kind == "tf32" else None)
        if share is not None:
            return share
        name = facts["attained_like"].get(name)
    return None
