"""Time a DataLoader with several settings and choose the one with the fewest workers that feeds a step."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainatomy.measurement.loader.processes import free_shared_memory, processors
from trainatomy.measurement.loader.timing import bytes_of, has_cuda_tensors, timed
from trainatomy.results.loader import LoaderNote, LoaderReport, LoaderSettings, LoaderTiming, StepToFeed
from trainatomy.training.factory import user_code

LONGER = 0.05
"""Share by which a loader may lengthen the step and still suffice."""
AT_HAND = 2
"""Batches in shared memory beside those made ahead of a worker: the one being made, and the one that was fetched."""


@dataclass
class _FirstBatch:
    bytes: int = 0
    is_cuda: bool = False

    def look(self, batch: Any) -> None:
        self.bytes, self.is_cuda = bytes_of(batch), has_cuda_tensors(batch)


def time_settings(
    loader: DataLoader[Any],
    settings: Sequence[LoaderSettings],
    step: StepToFeed | None,
    *,
    name: str,
    seconds: float = 2.0,
    random_samples: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> LoaderReport:
    """Time ``loader`` with each of ``settings``, which are in order of preference.

    Args:
        loader: The DataLoader whose dataset, order and collation are used.
        settings: Settings to time; those without workers are always timed first.
        step: The step to feed.
        name: Name for the report.
        seconds: Seconds for each of the settings.
        random_samples: The samples are drawn and stand for a dataset that is not known.
        progress: Called with what is being done.

    Raises:
        FactoryError: The dataset or its collation raised.
    """
    began_with_cuda = torch.cuda.is_initialized()
    can_pin = torch.cuda.is_available()
    first = _FirstBatch()
    plain = LoaderSettings(0, None, settings[0].pin_memory and can_pin, persistent_workers=False)
    wanted = [plain, *(replace(one, pin_memory=one.pin_memory and can_pin) for one in settings if one.num_workers)]
    found, free, usable = [], free_shared_memory(), processors()
    for one in wanted:
        progress(f"{one.num_workers} workers" if one.num_workers else "no workers")
        found.append(_time_one(loader, one, first, free, seconds, name))
    rated = tuple(_rated(one, step) for one in found)
    notes: dict[LoaderNote, bool] = {
        "random samples": random_samples,
        "not pinned": settings[0].pin_memory and not can_pin,
        "cuda initialised": torch.cuda.is_initialized() and not began_with_cuda,
        "more workers than processors": any(one.num_workers > usable for one in wanted),
        "no step": step is None,
        "host bounds": step is not None and step.host_seconds >= step.seconds * (1 - LONGER),
    }
    return LoaderReport(
        name=name,
        batch_size=getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size,
        batch_bytes=first.bytes,
        step=step,
        timings=rated,
        best=next((place for place, one in enumerate(rated) if one.suffices), None),
        processors=usable,
        shared_memory_bytes=free,
        start_method=multiprocessing.get_start_method(),
        notes=tuple(note for note, applies in notes.items() if applies),
    )


def _time_one(
    loader: DataLoader[Any], settings: LoaderSettings, first: _FirstBatch, free: int | None, seconds: float, name: str
) -> LoaderTiming:
    """Time one of the settings, unless its workers could not hand their batches over."""
    waiting = settings.num_workers * ((settings.prefetch_factor or 0) + 1) + AT_HAND if settings.num_workers else 0
    shared = waiting * first.bytes
    if settings.num_workers and first.is_cuda:
        return LoaderTiming(settings, problem="cuda tensors")
    if free is not None and shared > free:
        return LoaderTiming(settings, problem="shared memory", shared_bytes=shared)
    with user_code(f"{name}: its data"):
        found = timed(loader, settings, seconds, first.look)
    return replace(found, shared_bytes=shared)


def _rated(timing: LoaderTiming, step: StepToFeed | None) -> LoaderTiming:
    """Add the time of the step with this loader.

    Without workers the training's thread makes the batch and then launches the step; with workers it fetches the batch,
    while they make the next ones.  The GPU works beside both.
    """
    if step is None or timing.batch_seconds is None or timing.fetch_seconds is None:
        return timing
    thread = step.host_seconds + step.batches * timing.fetch_seconds
    longest = max(step.seconds, thread, step.batches * timing.batch_seconds)
    return replace(timing, step_seconds=longest, suffices=longest <= step.seconds * (1 + LONGER))
