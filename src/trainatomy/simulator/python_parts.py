"""Notes where another release of PyTorch is simulated than the installed one, whose Python runs all the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainatomy.catalog.versions import Version, parse_version, python_changes, version_text
from trainatomy.results.notes import LeadingNote
from trainatomy.results.plan import fsdp_version
from trainatomy.workload.schema import Workload


def python_part_notes(workload: Workload) -> Iterator[str]:
    """Yield a note on the parts of PyTorch written in Python that a training runs in another release than asked for."""
    wanted = parse_version(workload.software.torch or torch.__version__)
    return part_notes(wanted, tuple(python_parts(workload)))


def part_notes(wanted: Version, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield a note on parts of PyTorch that run as installed; one below the headline for each change that is known."""
    installed = parse_version(torch.__version__)
    if wanted == installed or not parts:
        return
    asked, here = version_text(wanted), version_text(installed)
    yield (
        f"software.torch: {asked} decides what PyTorch's operators, its allocator and cuBLAS do; {' and '.join(parts)} "
        f"{'runs' if len(parts) == 1 else 'run'} as in PyTorch {here}, which is installed here: to predict those of "
        f"{asked}, install it"
    )
    for change in python_changes(wanted, installed):
        if change.part in parts:
            yield LeadingNote(
                f"{change.part} is simulated as in PyTorch {here}: PyTorch {version_text(change.since)} changed it "
                f"({change.what}; {change.source})"
            )


def python_parts(workload: Workload) -> Iterator[str]:
    """Yield the parts of PyTorch, written in Python, that decide what a training allocates and launches."""
    parallel, train = workload.parallel, workload.train
    if workload.mode != "training":
        return
    if parallel.strategy == "fsdp2" or (train.fsdp and fsdp_version(train.fsdp_config) == 2):
        yield "FSDP2"
    if parallel.strategy == "fsdp1" or (train.fsdp and fsdp_version(train.fsdp_config) == 1):
        yield "FSDP1"
    if parallel.tp_size > 1 or parallel.cp_size > 1:
        yield "DTensor"
    if parallel.pp_size > 1:
        yield "pipelining"
    if parallel.strategy == "zero1":
        yield "ZeroRedundancyOptimizer"
    if train.gradient_checkpointing:
        yield "checkpointing"
