"""The search behind ``fit_training_arguments`` and ``predicted_batch_size``, for the machine that runs the script."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy import api
from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import DeviceError, DoesNotFit, WorkloadError
from trainatomy.integrations.live_prediction import restored_accelerate_state
from trainatomy.integrations.training_arguments import allocator_settings
from trainatomy.integrations.utilization import utilization
from trainatomy.reporters import search_sentences
from trainatomy.reporters import settings as words
from trainatomy.training.model import build_model
from trainatomy.training.stored_weights import stored_quantization
from trainatomy.units import printable
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.api import Batch
    from trainatomy.results.fit import Candidate, Fit

Model = nn.Module | str | Workload | Callable[[], nn.Module]
"""A model, its name on the hub, a workload, or a function without arguments that makes the model."""

_REMEDIES = 5
"""Ways out that an error lists."""


def best_settings(
    given: Model,
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
    *,
    batch: Batch | None,
    sequence_length: int | None,
    gpu: str | None,
    headroom: float,
    trust_remote_code: bool,
    print: bool,
    **options: Any,
) -> Candidate:
    """Search for settings as ``trainatomy.fit`` does, in the environment of this process.

    Prints the answer, and warns of ``notes`` and those of the prediction where the caller was called.

    Raises:
        DoesNotFit: No setting fits.
        TrainatomyError: The errors of ``trainatomy.fit``.
    """
    model = _built(given, trust_remote_code)
    sections = _sections(batch, sequence_length)
    if gpu is None:
        gpu = _this_gpu()
        headroom += _share_of_others(gpu)
    options |= {"gpu": gpu, "headroom": headroom, "batch": batch, "trust_remote_code": trust_remote_code}
    with restored_accelerate_state():
        found = api.fit(model, prices=False, **options, **sections, **settings)
    if found.interrupted:
        raise KeyboardInterrupt
    best = _best(found)
    if isinstance(model, nn.Module) and batch is None and sequence_length is None:
        notes = [*notes, *_assumed_length(best)]
    changed = [f"{words.option(each)}: {words.may_change(each)}" for each in best.changes if each.permission]
    for note in dict.fromkeys([*notes, *changed, *best.prediction.notes]):
        warnings.warn(f"the settings that fit: {note}", RuntimeWarning, stacklevel=3)
    if print:
        builtins.print(printable(f"trainatomy: {search_sentences.fit_answer(found, best)}"))
    return best


def _built(model: Model, trust_remote_code: bool) -> nn.Module | Workload:
    """Return a model that was given by its name on meta tensors, and the result of a function."""
    if isinstance(model, str):
        with torch.device("meta"):
            workload = Workload.from_mapping({"model": {"id": model}})
            built = build_model(workload, trust_remote_code=trust_remote_code)
        if stored_quantization(built) is not None:
            raise WorkloadError(
                f"model: {model} is stored quantised: pass a Workload with the adapters that are trained, model.lora"
            )
        return built
    if isinstance(model, nn.Module | Workload):
        return model
    made = model()
    if not isinstance(made, nn.Module):
        raise WorkloadError(f"model: the function returned a {type(made).__name__}, not a torch.nn.Module")
    return made


def _sections(batch: Batch | None, sequence_length: int | None) -> dict[str, Any]:
    """Return the sections of the workload that the arguments and this process's environment decide."""
    sections: dict[str, Any] = {}
    if sequence_length is not None:
        if batch is not None:
            raise WorkloadError("sequence_length: the batch has its length already; give one of the two")
        sections["data"] = {"sequence_length": sequence_length}
    if allocator := allocator_settings():
        sections["allocator"] = allocator
    return sections


def _assumed_length(best: Candidate) -> list[str]:
    """Return a note on the length of samples, which nobody gave."""
    time = best.prediction.time
    if time is None or not time.tokens_per_second:
        return []
    tokens = round(time.tokens_per_second / time.samples_per_second)
    return [f"every sample was taken to have {tokens:,} tokens; give sequence_length, or a batch, if yours differ"]


def _this_gpu() -> str:
    try:
        return api.this_gpu()
    except DeviceError as error:
        message = f"gpu: this machine has none; name the GPU to search for, such as gpu='rtx-4090'. {error}"
        raise WorkloadError(message, key="gpu") from None


def _share_of_others(gpu: str) -> float:
    """Return the share of this machine's GPU that other processes hold now."""
    now = utilization()
    return ((now.other_bytes or 0) + (now.unlisted_bytes or 0)) / find_gpu(gpu).memory_bytes


def _best(found: Fit) -> Candidate:
    """Return the best candidate; raise ``DoesNotFit`` if nothing fits."""
    if found.best is not None:
        return found.best
    message = f"no setting of {found.name} fits on {found.gpu.name}"
    if found.shortage is None:
        raise DoesNotFit(message)
    lines = [f"{message}: the smallest one {search_sentences.shortage(found.shortage)}."]
    steps = [search_sentences.remedy(each) for each in found.shortage.remedies if each.candidate.fits][:_REMEDIES]
    if steps:
        lines += ["What would make it fit:", *(f"- {step}" for step in steps)]
    raise DoesNotFit("\n".join(lines))
