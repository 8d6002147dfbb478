"""Batch sizes that are known before the first step, for a script of one's own.

transformers' ``auto_find_batch_size`` and accelerate's ``find_executable_batch_size`` start the training again with a
smaller batch until it no longer runs out of memory.  The effective batch size, and with it what is learnt, shrinks with
the batch.  Here a search without a GPU (``trainatomy.fit``) finds the batch size, and the accumulation steps that keep
the effective batch size.

The search behind ``fit_training_arguments`` and ``predicted_batch_size``, for the machine that runs the script.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from trainatomy import api
from trainatomy.api.verb import verb
from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import DeviceError, DoesNotFit, WorkloadError
from trainatomy.integrations.live_measurement import restored_accelerate_state
from trainatomy.integrations.training_arguments import (
    Arguments,
    allocator_settings,
    can_hold,
    check_launch,
    train_settings,
    with_candidate,
)
from trainatomy.integrations.utilization import utilization
from trainatomy.reporters import search_sentences
from trainatomy.reporters import settings as words
from trainatomy.requests.fitting import FitRequest
from trainatomy.requests.predicting import Batch, Training
from trainatomy.results.fit import Candidate, Fit
from trainatomy.training.model import build_model
from trainatomy.training.stored_weights import stored_quantization
from trainatomy.units import printable
from trainatomy.workload.schema import Workload

Model = nn.Module | str | Workload | Callable[[], nn.Module]
"""A model, its name on the hub, a workload, or a function without arguments that makes the model."""

_REMEDIES = 5
"""Ways out that an error lists."""


@dataclass(frozen=True, slots=True)
class BatchSizeRequest(FitRequest):
    """How to search for settings, as ``trainatomy.fit`` does, in the environment of the process that trains.

    Attributes:
        batch: A batch as the collator makes it, or a function of the batch size that returns one. A transformers model
            needs none, but the prediction is then for batches of full length without a mask.
        sequence_length: Tokens of the longest samples, in place of ``batch``.
        optimizer: The class of the optimizer, or a name of ``TrainingArguments.optim``.
        gpu: The GPU; by default this machine's, without the memory that other processes hold.
        allow: Changes of what is trained that may be made: "precision", "optimizer". A warning says what is learnt
            differently.
        print: Print the settings with their predicted throughput and memory, in one line.
    """

    batch: Batch | None = None
    sequence_length: int | None = None
    optimizer: str | type[torch.optim.Optimizer] | None = None
    gpu: str | None = None
    print: bool = True


@dataclass(frozen=True, slots=True)
class Search:
    """A search for settings.

    Attributes:
        model: What is trained.
        settings: Its settings by their name.
        request: How to search.
        notes: What to warn of besides the notes of the prediction.
    """

    model: Model
    settings: Mapping[str, Any]
    request: BatchSizeRequest
    notes: Sequence[str] = ()

    def best(self, level: int) -> Candidate:
        """Return the best settings; print them, and warn of notes where the caller was called, ``level`` calls above.

        Raises:
            DoesNotFit: No setting fits.
            TrainatomyError: The errors of ``trainatomy.fit``.
        """
        request, gpu, notes = self.request, self.request.gpu, self.notes
        model = _built(self.model, request.trust_remote_code)
        settings = {**_sections(request.batch, request.sequence_length), **self.settings}
        if gpu is None:
            gpu = _this_gpu()
            request = replace(request, headroom=request.headroom + _share_of_others(gpu))
        training = Training(model, request.batch, request.optimizer, gpu, settings)
        with restored_accelerate_state():
            found = api.search_settings(training, request)
        if found.interrupted:
            raise KeyboardInterrupt
        best = _best(found)
        if isinstance(model, nn.Module) and request.batch is None and request.sequence_length is None:
            notes = [*notes, *_assumed_length(best)]
        changed = [f"{words.option(each)}: {words.may_change(each)}" for each in best.changes if each.permission]
        for note in dict.fromkeys([*notes, *changed, *best.prediction.notes]):
            warnings.warn(f"the settings that fit: {note}", RuntimeWarning, stacklevel=level)
        if request.print:
            print(printable(f"trainatomy: {search_sentences.fit_answer(found, best)}"))
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


Result = TypeVar("Result")

_BATCH = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"
_PERMISSIONS = ("precision", "optimizer")


_SHARED = ("batch", "sequence_length", "optimizer", "gpu", "headroom", "calibration", "trust_remote_code", "print")
"""What both functions are asked."""


@verb(BatchSizeRequest, only=(*_SHARED, "allow", "keep"))
def fit_training_arguments(args: Arguments, model: nn.Module | str, *, request: BatchSizeRequest) -> Arguments:
    """Return a copy of ``TrainingArguments`` with the settings that fit the GPU and train fastest.

    It takes the place of ``auto_find_batch_size``, which is off in the copy.  The copy has another
    ``per_device_train_batch_size``, ``gradient_accumulation_steps``, ``gradient_checkpointing`` and implementation of
    the optimizer if these are faster; their product, the effective batch size, is that of ``args``.  Settings that the
    prediction does not simulate are refused by name, or named in a warning.

    Args:
        args: The arguments; they stay as they are.
        model: The model, on any device, which is neither changed nor moved; or its name on the hub, for the class that
            its configuration names.
        request: How to search.

    Raises:
        DoesNotFit: No setting fits; the message says what would make it fit.
        WorkloadError: A setting cannot be simulated, or the arguments contradict each other.
        TrainatomyError: The errors of ``trainatomy.fit``.
    """
    check_launch(args)
    if refused := [name for name in request.allow if name not in _PERMISSIONS]:
        raise WorkloadError(
            f"allow: {refused[0]} cannot be set by TrainingArguments; they can set {' and '.join(_PERMISSIONS)}"
        )
    settings, notes = train_settings(args)
    wanted = replace(request, prices=False, can_apply=can_hold)
    best = Search(model, {**settings, "loop": "trainer"}, wanted, notes).best(4)
    return with_candidate(args, best)


@verb(BatchSizeRequest, only=_SHARED)
def predicted_batch_size(
    function: Callable[..., Result] | None = None,
    *,
    model: Model,
    effective_batch_size: int,
    request: BatchSizeRequest,
    **settings: Any,
) -> Any:
    """Decorate a training function, which is then called once, with a batch size that fits and accumulation steps.

    It takes the place of accelerate's ``find_executable_batch_size``.  The function gets the two numbers as its first
    arguments; their product is the effective batch size.  The search runs when the function is first called.

        @predicted_batch_size(model=model, effective_batch_size=64, optimizer=torch.optim.AdamW, bf16=True)
        def train(batch_size, accumulation_steps, epochs): ...

        train(epochs=3)

    Args:
        function: The training function, where this is not used as a decorator.
        model: The model, on any device, which is neither changed nor moved; its name on the hub; a function without
            arguments that makes it; or a workload.
        effective_batch_size: Samples per optimizer step.
        request: How to search.
        **settings: What else the training function does, as in ``trainatomy.predict``: ``bf16=True``,
            ``gradient_checkpointing=True``, ``loop="trainer"``.  The search keeps all of it.

    Raises:
        DoesNotFit: No batch size fits; raised when the function is called, like the others.
        TrainatomyError: The errors of ``trainatomy.fit``.
        TypeError: The function is called with other arguments than those behind the first two.
    """
    if given := [name for name in (_BATCH, _ACCUMULATION) if name in settings]:
        raise WorkloadError(f"{given[0]}: predicted_batch_size finds it; give effective_batch_size", key=given[0])

    wanted = replace(request, effective_batch_size=effective_batch_size, prices=False, can_apply=_sets_batch)
    search = functools.partial(Search(model, settings, wanted).best, 3)
    decorate = functools.partial(_called_with_sizes, functools.cache(search))
    return decorate if function is None else decorate(function)


def _called_with_sizes(search: Callable[[], Candidate], function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that puts the sizes that a search finds before the arguments of ``function``."""

    @functools.wraps(function)
    def train(*arguments: Any, **keywords: Any) -> Result:
        _check_call(function, arguments, keywords)
        best = search()
        sizes = best.per_device_train_batch_size, best.gradient_accumulation_steps
        return function(*sizes, *arguments, **keywords)

    return train


def _sets_batch(settings: Mapping[str, object]) -> bool:
    """Return whether settings are a batch size with its accumulation steps, all that a training function is given."""
    return set(settings) <= {f"train.{_BATCH}", f"train.{_ACCUMULATION}"}


def _check_call(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` if a call does not go with the two numbers that are put before its arguments."""
    try:
        inspect.signature(function).bind(1, 1, *arguments, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(
            f"{name}: {error}. predicted_batch_size passes the batch size and the accumulation steps as its first two "
            "arguments; call it with the others only"
        ) from None
