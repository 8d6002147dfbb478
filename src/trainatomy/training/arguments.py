"""Make the ``TrainingArguments`` of a workload, for the Trainer and for the optimizer of the plain loop."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library
from trainatomy.workload.arguments import is_own
from trainatomy.workload.deepspeed import REPORTS
from trainatomy.workload.defaults import loop_checkpoints
from trainatomy.workload.document import suggestion
from trainatomy.workload.fsdp import PREPARED_BY, SHARDING_STRATEGY
from trainatomy.workload.loops import loop_of
from trainatomy.workload.trl import applied_settings

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trainatomy.workload.parallel import ParallelSpec
    from trainatomy.workload.schema import Workload

_QUIET: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "log_level": "error",
}
"""Settings that leave nothing but the step: no reports, files, evaluation or progress bar."""

_BY_LOOP = frozenset(
    {
        "eval_strategy",
        "do_eval",
        "save_strategy",
        "save_total_limit",
        "load_best_model_at_end",
        "resume_from_checkpoint",
        "eval_steps",
        "max_steps",
        "num_train_epochs",
    }
)
"""Settings that the loop applies: it says when the training ends, an evaluation runs and a checkpoint is saved."""

_LOADING: dict[str, Any] = {
    "dataloader_pin_memory": False,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "train_sampling_strategy": "random",
}
"""Settings for loading batches, whatever the workload says: they take no GPU memory, and ``training.lengths`` puts
samples of different lengths in order."""


def training_arguments(workload: Workload, *, steps: int, output_dir: str, use_cpu: bool) -> TrainingArguments:
    """Return the arguments of a training of ``steps`` optimizer steps.

    Raises:
        WorkloadError: transformers refuses a value; the message is its own.
        MissingLibrary: accelerate is not installed.
    """
    import_library("accelerate", "the Trainer")
    kind = _kind(workload)
    known = {field.name for field in dataclasses.fields(kind)}
    settings = {name: value for name, value in (_settings(workload) | _LOADING).items() if name in known}
    for name in (own := applied_settings(workload)).keys() - known:
        message = f"trl.{name}: {kind.__name__} has no such setting{suggestion(name, known)}"
        raise WorkloadError(message, key=f"trl.{name}")
    if workload.loop == "sft" and workload.data.prompt_length is not None:  # samples with prompts, as TRL calls them
        own.setdefault("completion_only_loss", True)
    settings |= own
    if workload.loop == "kto" or (loop_of(workload).settings is not None and workload.data.varies):
        settings["train_sampling_strategy"] = "sequential"  # as KTO asks for, and in the order of training.lengths
    try:
        made = kind(output_dir=output_dir, max_steps=steps, use_cpu=use_cpu, **_QUIET, **settings)
    except ValueError as error:
        raise WorkloadError(f"train: {error}", key="train") from error
    if workload.train.deepspeed is not None:
        _check_deepspeed(made)
    # With several GPUs, the Trainer wraps the model in DataParallel.
    made._n_gpu = min(made.n_gpu, workload.parallel.devices)
    return made


def _kind(workload: Workload) -> Any:
    """Return the class of the arguments: that of the loop's trainer."""
    import transformers

    if workload.train.predict_with_generate:
        return transformers.Seq2SeqTrainingArguments
    loop = loop_of(workload)
    library, _, name = loop.arguments.partition(":")
    return getattr(import_library(library, f"loop: {workload.loop}", install=loop.extra), name)


def _settings(workload: Workload) -> dict[str, Any]:
    """Return the settings in the form that transformers accepts, which excludes the path of an optimizer's class."""
    train = workload.train
    values = {name: value for name, value in train if value is not None and name not in _LOADING.keys() | _BY_LOOP}
    if not loop_of(workload).by_trainer:  # TrainingArguments would turn TF32 on
        values = {name: value for name, value in values.items() if not name.startswith("torch_compile")}
    if values.get("torch_compile") and train.dynamo_use_regional_compilation:
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    values["include_for_metrics"] = list(train.include_for_metrics)
    values["gradient_checkpointing"] = loop_checkpoints(workload)
    values["per_device_eval_batch_size"] = workload.eval_batch_size
    values["eval_on_start"] = workload.evaluates and train.eval_on_start
    if isinstance(values.get("optim_target_modules"), tuple):
        values["optim_target_modules"] = list(values["optim_target_modules"])
    if is_own(train.optim):
        values = {name: value for name, value in values.items() if name not in {"optim", "optim_args"}}
    if isinstance(values.get("fsdp"), tuple):
        values["fsdp"] = list(values["fsdp"])
    if "fsdp_config" in values:
        values["fsdp_config"] = copy.deepcopy(values["fsdp_config"])  # transformers fills it in
        values["fsdp_config"].pop(PREPARED_BY, None)
        if (strategy := values["fsdp_config"].pop(SHARDING_STRATEGY, None)) is not None:
            os.environ["FSDP_SHARDING_STRATEGY"] = str(strategy).upper()
    if "liger_kernel_config" in values:
        values["liger_kernel_config"] = dict(values["liger_kernel_config"])
    if "deepspeed" in values:
        values["deepspeed"] = {name: value for name, value in values["deepspeed"].items() if name not in REPORTS}
    if train.fsdp and (workload.parallel.replicas > 1 or workload.parallel.cp_size > 1):
        values["parallelism_config"] = _parallelism(workload.parallel)
    return values


def _check_deepspeed(made: Any) -> None:
    """Refuse settings that DeepSpeed's configuration gives otherwise than ``train``, as the Trainer would later."""
    mismatches = getattr(made.hf_deepspeed_config, "mismatches", [])
    if mismatches:
        listed = "\n".join(mismatches)
        raise WorkloadError(
            f'train.deepspeed: these values differ from those of train (hf); "auto" takes them over:\n{listed}',
            key="train.deepspeed",
        )


def _parallelism(parallel: ParallelSpec) -> Any:
    """Return accelerate's configuration: shards within groups of ranks, copies between them, ranks of a sequence."""
    from accelerate import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    copies, shares = parallel.replicas, parallel.cp_size
    handler = TorchContextParallelConfig(cp_comm_strategy=parallel.cp_comm_strategy) if shares > 1 else None
    return ParallelismConfig(
        dp_replicate_size=copies,
        dp_shard_size=parallel.data_parallel_size // copies,
        cp_size=shares,
        cp_handler=handler,
    )
