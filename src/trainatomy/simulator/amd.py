"""AMD GPUs: the releases of PyTorch whose build for HIP was read, and what a prediction says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.catalog.versions import Version, version_text
from trainatomy.errors import WorkloadError
from trainatomy.results.prediction import LeadingNote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainatomy.catalog.gpus import GPU

RELEASES: tuple[Version, ...] = ((2, 13), (2, 14))
"""Releases of torch whose source for HIP was read."""
_OF_MIOPEN = ("aten::convolution", "aten::cudnn_", "aten::miopen_", "aten::native_batch_norm")


def check_amd(gpu: GPU, torch_version: Version, ranks: int = 1) -> None:
    """Refuse a release of torch whose build for AMD GPUs was not read, and several AMD GPUs.

    Raises:
        WorkloadError: It is another release than ``RELEASES``, or there are several ranks, and the GPU is an AMD GPU.
    """
    if gpu.is_amd and ranks > 1:
        raise WorkloadError("several AMD GPUs are not simulated: RCCL's buffers and times are not known", key="gpu")
    if gpu.is_amd and torch_version not in RELEASES:
        known = " and ".join(map(version_text, RELEASES))
        raise WorkloadError(
            f"torch {version_text(torch_version)} is not simulated on AMD GPUs, whose kernels were read in torch "
            f"{known}: set software.torch: {version_text(RELEASES[0])}",
            key="software.torch",
        )


def amd_notes(gpu: GPU, operators: Iterable[str]) -> Iterator[str]:
    """Yield what a prediction for an AMD GPU does not know; ``operators`` are the names of those that ran."""
    if not gpu.is_amd:
        return
    yield LeadingNote(
        f"{gpu.name}: allocated and reserved memory follow from the source of PyTorch's build for HIP and were "
        "compared with no AMD GPU. Device memory is at least what is predicted: what HIP and its libraries hold "
        "besides is not known, so leave some room where it barely fits. Times are unmeasured: no time of an AMD GPU "
        "was compared. To check a prediction takes ten minutes: docs/amd.md"
    )
    if any(name.startswith(_OF_MIOPEN) for name in operators):
        yield (
            "convolutions and batch norms run on MIOpen, whose workspaces are not known: allocated and reserved memory "
            "are without them"
        )
