"""Resources that DataLoader workers take of this machine: processors, memory, /dev/shm.

Time a DataLoader alone, without a training.

Time a DataLoader with several settings and choose the one with the fewest workers that feeds a step.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from trainatomy.errors import FactoryError
from trainatomy.results.loader import LoaderNote, LoaderReport, LoaderSettings, LoaderTiming, StepToFeed
from trainatomy.training.factory import user_code

SHARED_MEMORY = Path("/dev/shm")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def processors() -> int:
    """Return the processors that this process may use, by its affinity and its container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return max(min(count, math.floor(int(quota) / int(period))), 1)
    except (OSError, ValueError):  # no limit: "max 100000", or another version of cgroups
        return count


def free_shared_memory() -> int | None:
    """Return the free bytes in /dev/shm, in which workers hand batches over; ``None``: there is none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def own_bytes(pids: Iterable[int]) -> int | None:
    """Return the memory that processes hold for themselves, without what a fork shares with its parent."""
    total = 0
    for pid in pids:
        try:
            lines = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        own = (line for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
        total += 1024 * sum(int(line.split()[1]) for line in own)
    return total


READY_BATCHES = 3
"""Batches that are fetched after they had time to get ready."""
WAIT_SECONDS = 1.0
"""The longest time to let them get ready."""


def with_settings(loader: DataLoader[Any], settings: LoaderSettings) -> DataLoader[Any]:
    """Return a DataLoader of the same dataset and batches with other settings."""
    workers: dict[str, Any] = {}
    if settings.num_workers:
        workers = {
            "prefetch_factor": settings.prefetch_factor,
            "persistent_workers": settings.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context if loader.num_workers else None,
        }
    batches: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        sampler = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
        batches = {"batch_size": loader.batch_size, **sampler}
        if loader.batch_size is not None:
            batches["drop_last"] = loader.drop_last
    return DataLoader(
        loader.dataset,
        num_workers=settings.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=settings.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        **batches,
        **workers,
    )


def bytes_of(batch: Any) -> int:
    """Return the bytes of the tensors in a batch."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def has_cuda_tensors(batch: Any) -> bool:
    """Return whether a batch has tensors on a GPU."""
    return any(leaf.is_cuda for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def timed(
    loader: DataLoader[Any], settings: LoaderSettings, seconds: float, look: Callable[[Any], None] = lambda batch: None
) -> LoaderTiming:
    """Time a DataLoader with some settings for about this many seconds; ``look`` gets the first batch."""
    chosen = with_settings(loader, settings)
    began = time.perf_counter()
    batches = iter(chosen)
    for batch in batches:
        look(batch)
        break
    else:
        raise FactoryError("dataset: it has no batch; is it smaller than batch_size with drop_last?")
    first = time.perf_counter() - began
    with _ending(batches):
        endless = _endless(chosen, batches)
        ahead = settings.num_workers * (settings.prefetch_factor or 0)
        batch_seconds = _steady(endless, ahead, seconds)
        memory = own_bytes(worker.pid for worker in getattr(batches, "_workers", ()))
        fetch = batch_seconds if not settings.num_workers else _ready(endless, batch_seconds, ahead)
    return LoaderTiming(
        settings,
        first_batch_seconds=first,
        batch_seconds=batch_seconds,
        fetch_seconds=min(fetch, batch_seconds) if settings.num_workers else fetch,
        worker_bytes=memory if settings.num_workers else 0,
    )


def _endless(loader: DataLoader[Any], batches: Iterator[Any]) -> Iterator[bool]:
    """Yield after each batch, epoch after epoch: whether it came from the same epoch as the one before."""
    while True:
        continued = True
        for _ in batches:
            yield continued
            continued = True
        batches = iter(loader)
        if next(batches, None) is None:
            return
        yield False


def _steady(batches: Iterator[bool], ahead: int, seconds: float) -> float:
    """Return the time between batches: after those that were made ahead, without the starts of epochs."""
    until = time.perf_counter() + seconds
    skipped, times, last = 0, list[float](), time.perf_counter()
    for continued in batches:
        now = time.perf_counter()
        if not continued:
            skipped = 0
        elif skipped < ahead:
            skipped += 1
        else:
            times.append(now - last)
        last = now
        if now >= until and (times or now >= until + seconds):
            break
    if not times:  # epochs are shorter than what is made ahead: every batch is a first one
        return seconds
    return sum(times) / len(times)


def _ready(batches: Iterator[bool], batch_seconds: float, ahead: int) -> float:
    """Return the time to fetch a batch that is ready."""
    time.sleep(min(batch_seconds * (ahead + 1), WAIT_SECONDS))
    times = []
    for _ in range(min(READY_BATCHES, ahead)):
        began = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - began)
    return median(times)


@contextmanager
def _ending(batches: Any) -> Iterator[None]:
    """End the worker processes of an iterator, also persistent ones."""
    try:
        yield
    finally:
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


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
