"""Apply the efficiencies measured on one GPU to another that nobody calibrated.

A calibration's efficiencies hold for the GPU it was measured on.  On another GPU three things differ besides the rates
of the data sheet:

- Matrix products attain another share of the peak: power limits lower the clock, and consumer GPUs run above the clock
  of their data sheet (``catalog/efficiency.yaml``, ``attained``).
- Hopper's tensor cores reach their peak only through its asynchronous instructions.  Kernels written for Ampere (flash
  and memory-efficient attention, matrix products of odd layouts) reach a lower share there than on earlier GPUs.
- A kernel that moves data takes the memory's time plus some time of the multiprocessors (instructions, conversions,
  waiting for dependencies): what it took on the calibrated GPU beyond its memory traffic.  The faster the
  multiprocessors are relative to memory, the closer a kernel comes to the memory's bandwidth.  A multiprocessor issues
  four instructions a clock on every GPU since 2017.

``source`` below is the GPU that was calibrated, ``target`` the one to predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.kernel import FP32_CORES

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU
    from trainatomy.operators.cost.kernel import Chip, KernelWork

_ASYNCHRONOUS_TENSOR_CORES = (9, 10)
"""Major compute capabilities with asynchronous tensor core instructions; consumer GPUs after Ada lack them."""
_WRITTEN_FOR_AMPERE = ("attention.", "matmul.half_", "matmul.tf32_")
"""Families of kernels that predate Hopper."""
_HALF_RATES = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """Factors that translate kernel times from the calibrated GPU (source) to another (target).

    Attributes:
        products: Target over source time of matrix products, by kind (half, tf32, fp32), beyond the data sheets' rates.
        older_kernels: The same for kernels written for GPUs older than the source.
        fp32_attention: The same for attention in fp32.
        compute_speed: Instruction rate of all multiprocessors, target over source.
        source_bandwidth: Memory bandwidth of the source, bytes per second.
        top_share: Share of the bandwidth that kernels reach which only move data.
        attained: Share of the target's peak that its fastest published products attain, by kind.
    """

    products: Mapping[str, float] = field(default_factory=dict)
    older_kernels: float = 1.0
    fp32_attention: float = 1.0
    compute_speed: float = 1.0
    source_bandwidth: float = 1.0
    top_share: float = 1.0
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
        kind = _precision_kind(work)
        scale = self.products.get(kind, 1.0)
        if work.family.startswith("attention.fp32"):
            scale *= self.fp32_attention
        elif work.family.startswith(_WRITTEN_FOR_AMPERE) and "cudnn" not in work.family:
            scale *= self.older_kernels
        least = work.bytes / (chip.bandwidth * self.top_share)
        share = self.attained.get(kind) if work.family.startswith("matmul.") else None
        fastest = work.flop / (chip.rate(work.rate) * share) if share else 0.0
        return max(seconds * scale, min(seconds, least), fastest)

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
        by_memory = work.bytes / (self.source_bandwidth * self.top_share)
        if on_source < by_memory:
            uncached = max(work.bytes - chip.l2_bytes, 0) / (chip.bandwidth * self.top_share)
            return max(on_source / self.compute_speed, uncached)
        return work.bytes / (chip.bandwidth * self.top_share) + (on_source - by_memory) / self.compute_speed


SAME_GPU = Extrapolation()
"""Scale of the calibrated GPU itself: no extrapolation."""


def extrapolation_between(source: GPU, target: GPU) -> Extrapolation:
    """Return the factors from the calibrated GPU ``source`` to ``target``."""
    facts = read_yaml("efficiency.yaml")
    products, attained = {}, {}
    for kind in ("half", "tf32", "fp32"):
        measured, other = _attained_share(facts, source, kind), _attained_share(facts, target, kind)
        products[kind] = measured / other if measured and other else 1.0
        if other:
            attained[kind] = other
    gains = (
        source.capability[0] in _ASYNCHRONOUS_TENSOR_CORES and target.capability[0] not in _ASYNCHRONOUS_TENSOR_CORES
    )
    older = float(facts["hopper"]["older_instructions"]) if gains else 1.0
    return Extrapolation(
        products,
        older,
        _fp32_attention(source, target, older),
        _instruction_rate(target) / _instruction_rate(source),
        source.bandwidth_bytes_per_second,
        facts["traffic"]["bandwidth"],
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
    kinds = {"fp16": "half", "bf16": "half", "tf32": "tf32", "fp32": "fp32"}
    kind = kinds.get(rate) if rate in gpu.rates else "fp32"  # a precision the GPU lacks is computed in fp32
    if kind is None:
        return None
    return _attained_share(read_yaml("efficiency.yaml"), gpu, kind)


def _precision_kind(work: KernelWork) -> str:
    """Return the key of ``Extrapolation.products`` for a product: half, tf32 or fp32."""
    parts = work.family.split(".")
    if parts[0] == "grouped":
        return "half" if work.rate in _HALF_RATES else "fp32"
    if parts[0] == "convolution":
        return "half" if work.rate in _HALF_RATES else work.rate
    return parts[1].partition("_")[0] if len(parts) > 1 else ""


def _attained_share(facts: Mapping[str, Any], gpu: GPU, kind: str) -> float | None:
    """Look up the share of the peak that products attain; an unknown share of TF32 is that of 16 bits."""
    known: Mapping[str, float] = facts["attained"].get(gpu.id, {})
    share = known.get(kind)
    return known.get("half") if share is None and kind == "tf32" else share


def _fp32_attention(source: GPU, target: GPU, older: float) -> float:
    """Return target over source time of fp32 attention, beyond the ratio of the fp32 rates.

    Where tensor cores support TF32, memory-efficient attention computes fp32 by three TF32 products
    (aten/src/ATen/native/transformers/cuda/mem_eff_attention/gemm_kernel_utils.h), so the TF32 rate and ``older``
    apply instead of the fp32 rate.
    """
    if "tf32" not in source.rates or "tf32" not in target.rates:
        return 1.0
    return older * (target.rates["fp32"] / source.rates["fp32"]) * (source.rates["tf32"] / target.rates["tf32"])


def _instruction_rate(gpu: GPU) -> float:
    """Return multiprocessors times clock; the clock follows from the fp32 peak."""
    return gpu.rates["fp32"] / (2 * FP32_CORES.get(gpu.capability, 128))
