"""What predictions for a GPU rest on, and what they were held against.

Summarize a calibration: the rates it measured beside those of the GPU's data sheet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.kernel import Chip, KernelWork, chip_of
from trainatomy.timing.cost_model import cost_model_of, gap_seconds
from trainatomy.timing.extrapolation import attained_share
from trainatomy.timing.intervals import interval_name
from trainatomy.units import percent

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration, Point
    from trainatomy.catalog.gpus import GPU


_FROM_MEMORY, _FROM_CACHE = 4.0, 0.25
"""Traffic relative to the size of the L2 cache: above the first the memory is measured, below the second the cache."""
_BANDWIDTH_TITLES = {
    "element-wise, 4 bytes": "traffic.plain.32",
    "element-wise, 2 bytes": "traffic.plain.16",
    "from 2 bytes to 4": "traffic.plain.mixed.widen",
    "from 4 bytes to 2": "traffic.plain.mixed.narrow",
    "transposed copies": "traffic.transposed",
    "softmax": "normalisation._softmax",
    "layer norm": "normalisation.native_layer_norm",
    "sums of rows": "reduction.rows",
    "sums of columns": "reduction.columns",
    "fused AdamW": "list.fused",
    "AdamW, foreach": "list.foreach",
}
_CPU_TITLES = {
    "graph": "forward of a training",
    "backward": "backward",
    "plain": "optimizer and inference",
    "loop": "between steps: loop, logging",
    "batch": "batches: collating, copying",
}


class Finding(NamedTuple):
    """A measured figure in ``unit``, beside the data sheet's (``None``: it gives none); ``at``: the size or place."""

    name: str
    measured: float
    unit: str
    data_sheet: float | None = None
    at: str = ""


def findings(calibration: Calibration) -> tuple[Finding, ...]:
    """Return the best rates by precision, bandwidths by kind of operator, waiting times and the CPU's factors."""
    gpu = calibration.known_gpu
    if gpu is None:
        return (*_waiting_times(calibration), *_cpu_factors(calibration))
    works = [(point, kernel_work(point.call, chip_of(gpu, point.tf32 or None))) for point in calibration.points]
    device = chip_of(gpu, tf32=None)
    return (*_rates(works, gpu), *_bandwidths(works, device), *_waiting_times(calibration), *_cpu_factors(calibration))


def _rates(works: list[tuple[Point, KernelWork]], gpu: GPU) -> Iterator[Finding]:
    best: dict[str, tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    for point, work in works:
        if work.family.startswith("matmul") and point.hot:
            a, b = point.call.inputs[-2:]
            shape = f"{a.shape[-2]} x {b.shape[-1]} x {a.shape[-1]}"
            best[work.rate] = max(best[work.rate], (work.flop / point.hot / 1e6, shape))
    for rate, (reached, shape) in best.items():
        yield Finding(f"matrix products, {rate}", reached, "TFLOP/s", gpu.rates.get(rate, 0) / 1e12 or None, shape)


def _bandwidths(works: list[tuple[Point, KernelWork]], chip: Chip) -> Iterator[Finding]:
    for title, family in _BANDWIDTH_TITLES.items():
        measured = [(p.cold or p.hot, w.bytes) for p, w in works if f"{w.family}.".startswith(f"{family}.")]
        large = [size / taken / 1e6 for taken, size in measured if taken and size > _FROM_MEMORY * chip.l2_bytes]
        if large:
            yield Finding(title, max(large), "TB/s", chip.bandwidth / 1e12, "from memory")
    cached = [
        work.bytes / point.hot / 1e6
        for point, work in works
        if work.family.startswith("traffic.plain.32") and work.bytes < _FROM_CACHE * chip.l2_bytes and point.hot
    ]
    if cached:
        yield Finding("element-wise, 4 bytes", max(cached), "TB/s", None, "from the L2 cache")


def _cpu_factors(calibration: Calibration) -> Iterator[Finding]:
    """Yield the CPU's speed relative to the reference host, by part of a step."""
    section = calibration.sections.get("host", {})
    for part, factor in section.get("factors", {}).items():
        yield Finding(_CPU_TITLES[part], factor, "times the reference host")


def _waiting_times(calibration: Calibration) -> Iterator[Finding]:
    yield Finding("gap between two kernels", gap_seconds(calibration) * 1e6, "µs")
    device = calibration.sections.get("device", {})
    waiting: Mapping[str, float] = device.get("waiting", {})
    for key, title in (
        ("item_us", "reading a value from an idle GPU"),
        ("synchronize_us", "synchronising an idle GPU"),
    ):
        if key in waiting:
            yield Finding(title, waiting[key], "µs")
    for entry in device.get("memory", ()):
        if entry["bytes"] in (2 * 2**20, 2**30):
            at = "2 MiB" if entry["bytes"] < 2**30 else "1 GiB"
            yield Finding("allocating memory (cudaMalloc)", entry["malloc_us"], "µs", None, at)
            yield Finding("freeing memory (cudaFree)", entry["free_us"], "µs", None, at)


_CONTEXT = ("contexts", "contexts.lazy", "contexts.lazy.first_tensor_bytes")
"""Names under which a GPU's context may be assumed, from the general to the special."""
_CHECKED = {
    "products": "matrix products in 16 bits",
    "moving": "element-wise kernels",
    "steps": "whole steps",
}
"""What ``catalog/checked.yaml`` has errors of, in words."""


def evidence_of(gpu: GPU) -> Iterator[tuple[str, str]]:
    """Yield what kinds of predictions for a GPU rest on, as pairs of a subject and a sentence."""
    rules = ".".join(map(str, gpu.capability)) if not gpu.is_amd else f"{gpu.architecture}, which no GPU confirmed"
    kind = "HIP on" if gpu.is_amd else "compute capability"
    yield "memory", f"allocated and reserved by PyTorch's rules for {kind} {rules}"
    assumed = assumed_context(gpu)
    yield "context", "measured or documented" if assumed is None else f"assumed: {assumed}"
    model = cost_model_of(gpu)
    yield "kernel times", model.source
    facts = read_yaml("efficiency.yaml")
    share = attained_share(facts, gpu, "bandwidth")
    source = "as published" if share else "as on an H200"
    yield "bandwidth", f"{_share(share or facts['traffic']['bandwidth'])} of the data sheet's is reached, {source}"
    known: Mapping[str, Any] = read_yaml("checked.yaml")["gpus"].get(gpu.id, {})
    errors = (
        f"{_CHECKED[kind]} {_share(found['median'])} (nine in ten within {_share(found['most'])})"
        for kind, found in known.items()
    )
    yield "error of times", f"{'; '.join(errors)}, of published times that were not used" if known else "not checked"
    intervals = read_yaml("intervals.yaml")[interval_name(calibrated=model.calibrated, unmeasured=model.unmeasured)]
    (low, high), (slow_low, slow_high) = intervals["gpu"], intervals["host"]
    ends = intervals.get("convolutions")
    convolving = " ({} to {} if much of it are convolutions)".format(*ends) if ends else ""
    yield (
        "interval",
        f"{low} to {high} of the predicted step where the GPU bounds it{convolving}, "
        f"{slow_low} to {slow_high} where the CPU does",
    )
    if gpu.is_amd:
        yield "to do better", "a comparison with a run, which takes ten minutes: docs/amd.md"
    elif not model.calibrated:
        yield "to do better", "`trainatomy calibrate` on this card, then `--calibration FILE`"


def assumed_context(gpu: GPU) -> str | None:
    """Return how the memory that a process holds outside the allocator was assumed, None where it is known."""
    return next((gpu.assumed[name] for name in _CONTEXT if name in gpu.assumed), None)


def _share(share: float) -> str:
    return percent(share, 1.0, 0 if share >= 0.1 else 1)
