"""The verbs: predict, compare, measure. Each takes a workload and gives values."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from trainatomy.allocator.replay import Replay, replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.facts.cards import Card, card
from trainatomy.ledger.balance import by_component, by_module, held_after, lines
from trainatomy.ledger.purposes import lifetimes, purposes
from trainatomy.ledger.rules import bytes_per_parameter
from trainatomy.ledger.timeline import timeline as over_steps
from trainatomy.results.bill import (
    CardSummary,
    Components,
    Fact,
    Instant,
    Measurement,
    Memory,
    OutOfMemoryPoint,
    Prediction,
    Verdict,
)
from trainatomy.results.tape import Tape
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.world.simulate import Simulation

TIGHT_SHARE = 0.05


def predict(workload: Workload, *, timeline: bool = False, trust_remote_code: bool = False) -> Prediction:
    """What one training step holds in GPU memory, without a GPU."""
    from trainatomy.world.simulate import simulate

    start = time.perf_counter()
    chosen = card_of(workload)
    simulation = simulate(workload, chosen, trust_remote_code=trust_remote_code)
    return settle(workload, chosen, simulation, timeline=timeline, started=start)


def card_of(workload: Workload) -> Card:
    """The card that a workload asks about."""
    return card(workload.gpu) if isinstance(workload.gpu, str) else workload.gpu.card()


def settle(workload: Workload, chosen: Card, simulation: Simulation, *, timeline: bool, started: float) -> Prediction:
    """The bill of a tape."""
    tape = simulation.tape
    settings = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    context = context_bytes(workload, chosen)
    capacity = chosen.memory_bytes - context
    unlimited = replay(tape, settings, device_bytes=chosen.memory_bytes)
    bounded = unlimited if unlimited.peak_reserved_bytes <= capacity else replay(tape, settings, capacity, device_bytes=chosen.memory_bytes)
    fits = bounded.out_of_memory is None
    shown = bounded if fits else unlimited
    memory, modules, kinds, held = _memory(tape, shown, context)
    room = chosen.memory_bytes - memory.device_bytes
    return Prediction(
        name=workload.name or str(workload.model.id or workload.model.class_ or workload.model.factory),
        workload=workload.to_mapping(),
        card=CardSummary(chosen.id, chosen.name, chosen.memory_bytes, chosen.capability),
        fits=fits,
        verdict=_verdict(fits, room, chosen.memory_bytes, bounded),
        room_bytes=room,
        memory=memory,
        modules=modules,
        bytes_per_parameter=bytes_per_parameter(workload, simulation.parameters, simulation.trainable_parameters, memory),
        facts=_facts(workload, chosen, simulation, context),
        notes=(),
        out_of_memory=_failure(tape, bounded),
        timeline=over_steps(tape, kinds, list(shown.block_bytes)) if timeline else (),
        seconds_taken=time.perf_counter() - started,
        versions=_versions(),
    )


def _memory(tape: Tape, shown: Replay, context: int) -> tuple[Memory, tuple, list, list[int]]:
    kinds = purposes(tape, lifetimes(tape))
    peak = shown.peak_allocated_at or 0
    held = held_after(tape, peak)
    sizes = shown.block_bytes
    parts = by_component(held, kinds, sizes)
    loaded = next((m.event for m in tape.marks if m.name == "loaded"), 0)
    memory = Memory(
        peak_allocated_bytes=shown.peak_allocated_bytes,
        peak_reserved_bytes=shown.peak_reserved_bytes,
        device_bytes=shown.peak_reserved_bytes + context,
        peak_requested_bytes=_peak_requested(tape),
        model_bytes=shown.allocated_bytes[loaded - 1] if loaded else 0,
        components=Components(**parts, cache=shown.peak_reserved_bytes - shown.peak_allocated_bytes, context=context),
        lines=lines(held, kinds, sizes),
        peak=_instant(tape, peak),
        num_alloc_retries=shown.num_alloc_retries,
    )
    return memory, by_module(tape, held, kinds, sizes), kinds, held


def _peak_requested(tape: Tape) -> int:
    sizes: dict[int, int] = {}
    now = peak = 0
    for action, allocation, size, _ in tape.events:
        if action == "alloc":
            sizes[allocation] = size
            now += size
            peak = max(peak, now)
        elif action == "free":
            now -= sizes.pop(allocation)
    return peak


def _instant(tape: Tape, event: int) -> Instant:
    if not tape.events:
        return Instant(-1, "load", "", "")
    origin = tape.origins[tape.events[event].allocation]
    return Instant(origin.step, origin.phase, origin.module, origin.operation)


def _failure(tape: Tape, bounded: Replay) -> OutOfMemoryPoint | None:
    failure = bounded.out_of_memory
    if failure is None or bounded.out_of_memory_at is None:
        return None
    return OutOfMemoryPoint(_instant(tape, bounded.out_of_memory_at), failure.requested_bytes, failure.allocated_bytes, failure.reserved_bytes)


def _verdict(fits: bool, room: int, total: int, bounded: Replay) -> Verdict:
    if not fits:
        return "does not fit"
    return "tight" if room < TIGHT_SHARE * total or bounded.num_alloc_retries else "fits"


def precision_of(workload: Workload) -> str:
    """fp32, or the 16-bit type that kernels run in: by autocast or by weights."""
    train = workload.train
    if workload.mode == "inference" and (train.fp16_full_eval or train.bf16_full_eval):
        return "fp16" if train.fp16_full_eval else "bf16"
    if train.fp16 or train.bf16:
        return "fp16" if train.fp16 else "bf16"
    return {"float16": "fp16", "bfloat16": "bf16"}.get(workload.model.dtype, "fp32")


def context_bytes(workload: Workload, chosen: Card) -> int:
    """What the process holds outside PyTorch's allocator: the CUDA context and the kernels that this training loads."""
    era = "eager-cuda-11" if workload.era == "2022" and "eager-cuda-11" in chosen.contexts else "lazy"
    return chosen.context(era).after_training(precision_of(workload))


def _facts(workload: Workload, chosen: Card, simulation: Simulation, context: int) -> tuple[Fact, ...]:
    source = chosen.source("contexts.lazy")
    measured = not source.startswith("assumed") and source != "unknown"
    memory_source = chosen.source("memory_bytes")
    return (
        Fact("card memory", str(chosen.memory_bytes), "assumed" if memory_source.startswith("assumed") else "measured", memory_source),
        Fact("context and kernels", str(context), "measured" if measured else "assumed", source),
        Fact("allocator", workload.allocator or "default settings", "computed", f"twin of the caching allocator of torch {simulation.torch_version[0]}.{simulation.torch_version[1]}"),
        Fact("tensors", f"{len(simulation.tape.origins)} allocations in {simulation.steps} steps", "computed", "the step, executed on tensors without data"),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "trainatomy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def compare(workloads: Sequence[Workload], *, timeline: bool = False, trust_remote_code: bool = False) -> tuple[Prediction, ...]:
    """Predict several workloads, in order."""
    return tuple(predict(w, timeline=timeline, trust_remote_code=trust_remote_code) for w in workloads)


def measure(workload: Workload, *, tape: str | None = None, time_limit: float | None = None) -> Measurement:
    """The same step on this machine's GPU, in a fresh process."""
    from trainatomy.gpu.measure import measure as run

    return run(workload, tape=tape, time_limit=time_limit)
