"""What predictions for a GPU rest on, and what they were held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import read_yaml
from trainatomy.timing.cost_model import cost_model_of
from trainatomy.timing.extrapolation import attained_share
from trainatomy.timing.intervals import interval_name
from trainatomy.units import percent

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU

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
