"""``TrainingArguments`` of a user's script: described as settings of a workload, and with the settings of a search."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from trainatomy.errors import WorkloadError
from trainatomy.integrations.live_measurement import restored_accelerate_state
from trainatomy.reporters.export_python import OF_TORCH
from trainatomy.results.fit import Candidate
from trainatomy.training.checkpointing import takes_every_and_offload
from trainatomy.training.process import set_tf32
from trainatomy.workload.arguments import NEW_NAMES, arguments
from trainatomy.workload.schema import Workload
from trainatomy.workload.train import TrainSpec

Arguments = TypeVar("Arguments", bound=TrainingArguments)

_EVERY = "every_n_layers"
_PRECISIONS = ("fp16", "bf16")


def check_launch(args: TrainingArguments) -> None:
    """Raise ``WorkloadError`` for what the launcher or the machine adds to a training and no setting of it says."""
    if args.world_size > 1 or args.n_gpu > 1:
        count = max(args.world_size, args.n_gpu)
        raise WorkloadError(
            f"TrainingArguments: this training runs on {count} GPUs, and arguments are predicted on one: start one "
            "process with CUDA_VISIBLE_DEVICES set to one GPU, or predict all of them with `trainatomy fit --gpus`"
        )
    if getattr(args, "deepspeed_plugin", None) is not None:
        raise WorkloadError(
            "TrainingArguments: arguments are predicted without DeepSpeed: leave it out, or predict a workload with "
            "train.deepspeed"
        )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise WorkloadError(
            "ACCELERATE_DYNAMO_BACKEND: the launcher turns torch.compile on, which is not simulated; "
            "say torch_compile=True in the arguments instead"
        )


def train_settings(args: TrainingArguments) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what arguments set, as the ``train`` section of a workload, and notes on what cannot be simulated.

    Raises:
        WorkloadError: A setting changes the memory of a step in a way that is not simulated.
    """
    settings, unknown = dict[str, Any](), list[str]()
    for name, value in _changed(args):
        name = NEW_NAMES.get(name, name)
        if name in TrainSpec.model_fields or name in arguments().names():
            settings[name] = value
        else:
            unknown.append(name)
    settings.pop("auto_find_batch_size", None)  # what the search takes the place of
    launched = getattr(args, "mixed_precision", "no")  # also set by `accelerate launch --mixed_precision`
    if launched in _PRECISIONS:
        settings.setdefault(launched, True)
    elif launched not in (None, "no"):
        raise WorkloadError(f"mixed_precision: {launched} is not simulated: use bf16 or fp16")
    notes = [f"{name}: {type(args).__name__} sets it, and it is not simulated" for name in unknown]
    if "optim_args" in settings and settings.get("optim", _value(args.optim)) in OF_TORCH:
        del settings["optim_args"]
        notes.append(f"optim_args: the Trainer does not pass them to {_value(args.optim)}, so they have no effect")
    train = _validated(settings)
    if train.eval_strategy != "no" and not train.prediction_loss_only:
        notes.append(
            "train.eval_strategy: a Trainer with compute_metrics gathers logits in evaluations, which arguments do not "
            "say; data.compute_metrics counts them"
        )
    return settings, (*notes, *train.notes())


def _changed(args: TrainingArguments) -> Iterator[tuple[str, Any]]:
    """Yield the fields that differ from those of a ``TrainingArguments`` made without settings."""
    with restored_accelerate_state():
        plain = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu)
    for field in dataclasses.fields(args):
        if not field.init:
            continue
        own = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value = _value(getattr(args, field.name))
        if value != _value(getattr(plain, field.name, own)):
            yield field.name, value


def _value(setting: Any) -> Any:
    """Return the value of a member of an enumeration, other settings as they are."""
    return getattr(setting, "value", setting)


def _validated(settings: Mapping[str, Any]) -> TrainSpec:
    return Workload.from_mapping({"model": {"class": "model"}, "train": dict(settings)}).train


def can_hold(settings: Mapping[str, object]) -> bool:
    """Return whether ``TrainingArguments`` can say what an option of a search sets, for the release of transformers."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section not in ("train", "model") or (name == "optim_args" and value is not None):
            return False
        if (
            name == "gradient_checkpointing_every"
            and isinstance(value, int)
            and value > 1
            and not takes_every_and_offload()
        ):
            return False
    return True


def with_candidate(args: Arguments, candidate: Candidate) -> Arguments:
    """Return a copy of arguments with the settings that a candidate of a search changes."""
    train = Workload.from_mapping(candidate.workload).train
    changed = {key.removeprefix("train.") for each in candidate.changes for key in each.settings}
    names = changed & set(TrainSpec.model_fields) | {"per_device_train_batch_size", "gradient_accumulation_steps"}
    values = {name: getattr(train, name) for name in names}
    if "gradient_checkpointing" in values:
        every = values.pop("gradient_checkpointing_every", 1)
        values["gradient_checkpointing_kwargs"] = _checkpointing_kwargs(args, every)
    values |= {new: values[old] for new, old in NEW_NAMES.items() if old in values and hasattr(args, new)}
    if "optim" in values:
        values["optim"] = OptimizerNames(values["optim"])
    if args.tf32 and values.get("tf32", True) is None:
        values["tf32"] = False  # making the arguments has switched TF32 on for the process
    made = copy.copy(args)
    for name, value in {**values, "auto_find_batch_size": False}.items():
        setattr(made, name, value)
    if names.intersection(_PRECISIONS):
        made.mixed_precision = next((name for name in _PRECISIONS if getattr(made, name)), "no")
    if made.tf32 != args.tf32:
        set_tf32(train.model_copy(update={"tf32": made.tf32}))
    return made


def _checkpointing_kwargs(args: TrainingArguments, every: int) -> dict[str, Any] | None:
    rest = {name: value for name, value in (args.gradient_checkpointing_kwargs or {}).items() if name != _EVERY}
    return (rest | {_EVERY: every} if every > 1 else rest) or None


def allocator_settings() -> str:
    """Return the settings of PyTorch's allocator in this process, from the environment."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
