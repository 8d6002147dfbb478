"""CPU time of stacking samples into a batch.

``torch.stack`` copies one sample after the other, each by a thread for every 32,768 of its elements, which wake up for
it (aten/src/ATen/native/TensorShape.cpp).  The memory of a batch of 32 MiB or more is new in every step, as the C
library maps it and gives it back, and the operating system hands out its pages while they are written: that takes
longer than the copy.

On the machine of an H200 (torch 2.11, 16 threads, 2.2 times as slow as a quiet one, 2026-11-28;
``lab/timing/records/stacks-h200.jsonl``) batches of samples of 120, 200 and 600 kB took 0.23, 0.17 and 0.10 ns a
byte if they were smaller, and 0.64, 0.39 and 0.19 ns if they were larger.  In trainings it takes 1.6 times as long:
threads have waited for longer, and samples are not in the CPU's caches.  That factor is from 388 steps
(``records/trainings-*.jsonl.gz``) whose batches have more than 3 MB.  With families left out, 97 of them that the GPU
bounds are met within 2.3 % in the median and 6.2 % in nine of ten, instead of 3.9 and 9.0 % by bytes alone.  Where one
thread stacks, as in processes that ``torchrun`` starts, no step was measured, and the factor is left out: there new
tensors took 0.5 ns a byte beside a host that was 2 times as slow (``catalog/hosts.yaml``), as much as without it.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainatomy.results.operations import Array
    from trainatomy.timing.host_costs import CPUCosts

MAPPED_BYTES = 2**25
"""From how many bytes on the C library asks the operating system for each tensor's memory and gives it back at once.

glibc's ``M_MMAP_THRESHOLD`` grows with what a process frees, up to this size (mallopt(3)).
"""
_GRAIN = 32768
"""Elements that one thread copies at least: ``at::internal::GRAIN_SIZE``."""
_ALONE = 0.612
"""What one thread takes, as measured apart, as a share of what it takes among several in a training."""
_PAGED_AT_ONCE = 5
"""Threads beyond which pages are handed out no faster: results of 16 threads (``new_host_byte``) take as long."""


def stacking_seconds(batch: Array, costs: CPUCosts) -> float:
    """Return the CPU time of stacking the samples of a batch."""
    samples = batch.shape[0] if batch.shape else 1
    threads = min(ceil(batch.elements / max(samples, 1) / _GRAIN), costs.threads)
    if not threads:
        return 0.0
    byte = costs.stacking["byte"] / threads
    if batch.bytes >= MAPPED_BYTES:
        byte += costs.stacking["page_byte"] / min(threads, _PAGED_AT_ONCE)
    if costs.threads == 1:
        byte *= _ALONE
    return samples * costs.stacking["thread"] * (threads - 1) + batch.bytes * byte
