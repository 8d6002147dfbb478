"""Time a DataLoader alone, without a training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from trainatomy.errors import FactoryError
from trainatomy.measurement.loader.processes import own_bytes
from trainatomy.results.loader import LoaderSettings, LoaderTiming

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
