"""Settings of different sections that contradict each other: each function returns problems of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.results.prediction import fsdp_version
from trainatomy.workload.defaults import era_problems
from trainatomy.workload.generation import GenerationSpec
from trainatomy.workload.loops import LOOPS, unsupported_settings
from trainatomy.workload.quantization import quantised_problems
from trainatomy.workload.section import Problem
from trainatomy.workload.spreading import spreading_problems
from trainatomy.workload.train import TrainSpec
from trainatomy.workload.trl import trl_problems

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

MAX_BATCH_SAMPLES = 2**22
"""Samples in a batch: to join more takes the CPU many seconds."""
MAX_BATCH_ELEMENTS = 2**30
"""Samples times tokens in a batch. One activation of 256 float32 values for each would take 1 TiB."""


MAX_ACCUMULATION = 10_000
"""Micro-batches of a step: what each allocates is kept, and 100,000 of them take 16 GiB of host memory."""


def contradictions(workload: Workload) -> list[Problem]:
    """Return problems between keys of different sections of a workload."""
    return [
        *_unscalable_gradients(workload),
        *_refused_by_loop(workload),
        *_targets(workload),
        *_oversized_batch(workload),
        *_oversized_step(workload),
        *spreading_problems(workload),
        *_evaluation(workload),
        *_best_model(workload),
        *quantised_problems(workload, is_quantised=workload.model.is_quantised),
        *_lengths(workload),
        *_generation(workload),
        *trl_problems(workload),
        *_average(workload),
        *_skipped_steps(workload),
        *_offloading(workload),
        *_compiled(workload),
        *era_problems(workload),
    ]


def _compiled(workload: Workload) -> list[Problem]:
    """Refuse training runs whose compiled step is not simulated."""
    if workload.mode != "training" or not workload.train.compiles:
        return []
    reasons = {
        "several GPUs": workload.parallel.world_size > 1 or workload.parallel.devices > 1,
        "model.quantization": workload.model.quantization is not None,
        "data.lengths, with which PyTorch compiles for sizes that it does not know": workload.data.lengths is not None,
        "an evaluation between the steps": workload.evaluates,
        f"loop: {workload.loop}": workload.loop not in ("trainer", "pytorch"),
    }
    message = "a compiled step is not simulated with"
    return [Problem(("train", "torch_compile"), f"{message} {what}") for what, found in reasons.items() if found]


def _unscalable_gradients(workload: Workload) -> list[Problem]:
    """Refuse float16 gradients that GradScaler would unscale (torch/amp/grad_scaler.py, ``_unscale_grads_``).

    It unscales before clipping, and before the step of every optimizer that does not unscale inside its kernel.
    """
    if not workload.cannot_unscale(workload.model.dtype):
        return []
    message = (
        "gradient scaling cannot unscale the float16 gradients of float16 weights "
        "(PyTorch raises `Attempting to unscale FP16 gradients.`): use dtype float32, or bf16, or remove fp16"
    )
    return [Problem(("train", "fp16"), message)]


def _refused_by_loop(workload: Workload) -> list[Problem]:
    """Return a problem for each setting that the loop cannot apply."""
    defaults = {name: field.default for name, field in TrainSpec.model_fields.items()}
    refused = unsupported_settings(LOOPS[workload.loop], workload.train, defaults)
    return [Problem(("train", name), reason) for name, reason in refused.items()]


def _targets(workload: Workload) -> list[Problem]:
    if workload.model.lora is not None and workload.model.freeze:
        return [Problem(("model", "freeze"), "cannot be combined with lora, which freezes everything but the adapters")]
    return []


def _oversized_batch(workload: Workload) -> list[Problem]:
    """Refuse batches that fit on no GPU, whose tensors would take minutes to make on the CPU."""
    tokens = 1 if workload.data.factory else workload.data.sequence_length or 1
    if workload.batch_size <= MAX_BATCH_SAMPLES and workload.batch_size * tokens <= MAX_BATCH_ELEMENTS:
        return []
    is_eval = workload.mode != "training" and workload.train.per_device_eval_batch_size is not None
    name = "per_device_eval_batch_size" if is_eval else "per_device_train_batch_size"
    message = f"is too large for any GPU: {workload.batch_size:,} samples"
    return [Problem(("train", name), message + (f" of {tokens:,} tokens" if tokens > 1 else ""))]


def _oversized_step(workload: Workload) -> list[Problem]:
    """Refuse steps of so many micro-batches that the host's memory would be full before they are predicted."""
    count = workload.train.gradient_accumulation_steps
    if workload.mode != "training" or count <= MAX_ACCUMULATION:
        return []
    message = f"{count:,} micro-batches are more than are simulated in a step ({MAX_ACCUMULATION:,}): use larger ones"
    return [Problem(("train", "gradient_accumulation_steps"), message)]


def _evaluation(workload: Workload) -> list[Problem]:
    """Refuse evaluations whose memory is not determined, and metrics that nothing computes."""
    data, problems = workload.data, []
    if workload.evaluates and workload.gathers_outputs and data.eval_samples is None:
        message = (
            "evaluation keeps the outputs of all samples on the GPU until its end: say how many there are, or set "
            "eval_accumulation_steps"
        )
        problems.append(Problem(("data", "eval_samples"), message))
    if data.preprocess_logits_for_metrics is not None and not data.compute_metrics:
        problems.append(Problem(("data", "preprocess_logits_for_metrics"), "needs compute_metrics"))
    if workload.train.predict_with_generate and workload.evaluates and not data.compute_metrics:
        message = "needs data.compute_metrics: without it the Trainer computes the loss only"
        problems.append(Problem(("train", "predict_with_generate"), message))
    if workload.train.batch_eval_metrics and data.compute_metrics is True:
        message = "batch_eval_metrics calls it with tensors of the GPU: name the function"
        problems.append(Problem(("data", "compute_metrics"), message))
    return problems


def _best_model(workload: Workload) -> list[Problem]:
    """Refuse what the Trainer refuses: a best model of checkpoints that are not evaluated when they are saved."""
    train = workload.train
    if workload.mode != "training" or not train.load_best_model_at_end or train.save_strategy == "best":
        return []
    saved = train.save_strategy or "steps"  # transformers' default
    if train.eval_strategy == saved:
        return []
    message = f"needs eval_strategy and save_strategy to be equal, found {train.eval_strategy} and {saved}"
    return [Problem(("train", "load_best_model_at_end"), message)]


def _lengths(workload: Workload) -> list[Problem]:
    """Refuse lengths of samples where batches of different lengths are not simulated."""
    here, train = ("data", "lengths"), workload.train
    if workload.data.lengths is None:
        return []
    problems = []
    if workload.mode != "training":
        problems.append(Problem(here, f"are those of a training; for {workload.mode} give data.sequence_length"))
    if workload.parallel.world_size > 1 and not _deals_out_lengths(workload):
        message = "are simulated on several GPUs with DDP and FSDP2, by loop: trainer and pytorch"
        problems.append(Problem(here, message))
    if workload.evaluates:
        message = "evaluation is not simulated together with data.lengths: predict one without the other"
        problems.append(Problem(("train", "eval_strategy"), message))
    if workload.saves:
        message = "saving is not simulated together with data.lengths: predict one without the other"
        problems.append(Problem(("train", "save_strategy"), message))
    if workload.resumes:
        message = "resuming is not simulated together with data.lengths: predict one without the other"
        problems.append(Problem(("train", "resume_from_checkpoint"), message))
    if workload.data.varies and (train.torch_empty_cache_steps or 1) > 1:
        message = "cannot be combined with data.lengths, except as 1: steps would differ by their number"
        problems.append(Problem(("train", "torch_empty_cache_steps"), message))
    return problems


def _deals_out_lengths(workload: Workload) -> bool:
    """Return whether every rank takes batches of its own, in a training whose steps can be put together from others."""
    parallel, train = workload.parallel, workload.train
    if workload.loop not in ("trainer", "pytorch") or parallel.data_parallel_size < parallel.world_size:
        return False
    if workload.loop == "pytorch":
        return parallel.strategy in (None, "ddp", "fsdp2")
    return parallel.strategy is None and not (train.fsdp and fsdp_version(train.fsdp_config) == 1)


def _average(workload: Workload) -> list[Problem]:
    """Refuse a moving average of the weights where no loop keeps one."""
    if workload.ema_decay is None:
        return []
    parallel, here = workload.parallel, ("ema_decay",)
    if workload.mode != "training" or workload.loop != "pytorch":
        return [Problem(here, "is kept by loop: pytorch; the Trainer keeps no average of the weights")]
    if parallel.world_size > 1 or parallel.devices > 1:
        return [Problem(here, "is simulated on one GPU")]
    return []


def _skipped_steps(workload: Workload) -> list[Problem]:
    """Refuse skipped steps where nothing scales gradients, and where the steps of a training are not alike."""
    if not workload.skipped_steps:
        return []
    here = ("skipped_steps",)
    if workload.mode != "training" or not workload.train.fp16:
        return [Problem(here, "needs train.fp16 and mode: training: nothing else scales gradients")]
    if workload.steps is not None and workload.skipped_steps >= workload.steps:
        return [Problem(here, f"must be fewer than steps, which is {workload.steps}")]
    reasons = {
        "data.lengths": workload.data.lengths is not None,
        "an evaluation or a checkpoint between the steps": workload.pauses,
        "train.deepspeed, which scales gradients itself": workload.train.deepspeed is not None,
        "several GPUs": workload.parallel.world_size > 1 or workload.parallel.devices > 1,
    }
    return [Problem(here, f"is not simulated with {what}") for what, found in reasons.items() if found]


_OFFLOADING_LOOPS = ("sft", "dpo", "kto", "reward")
"""Loops of TRL with a setting of their own for activations in host memory."""
_OFFLOADED_CHECKPOINTS = "train.gradient_checkpointing_kwargs: {offload: true}"


def _offloading(workload: Workload) -> list[Problem]:
    """Refuse activations in host memory where no loop keeps them there, and where that is not simulated."""
    if workload.activation_offloading is None:
        return []
    parallel, here = workload.parallel, ("activation_offloading",)
    if workload.mode != "training":
        return [Problem(here, f"keeps what backward needs; mode: {workload.mode} has no backward")]
    if workload.loop != "pytorch":
        others = "trl.activation_offloading" if workload.loop in _OFFLOADING_LOOPS else _OFFLOADED_CHECKPOINTS
        return [Problem(here, f"is for loop: pytorch; with loop: {workload.loop} there is {others}")]
    if parallel.devices > 1 or parallel.pp_size > 1:
        strategy = "DataParallel" if parallel.devices > 1 else "a pipeline"
        return [Problem(here, f"is not simulated with {strategy}")]
    if workload.train.compiles:
        return [Problem(here, "cannot be combined with train.torch_compile: a compiled step is simulated without it")]
    return []


def _generation(workload: Workload) -> list[Problem]:
    """Refuse a generation of unknown length, and settings that nothing would apply."""
    if workload.mode == "generation" and workload.generation.max_new_tokens is None:
        return [Problem(("generation", "max_new_tokens"), "say how many tokens to generate for each prompt")]
    generates = workload.mode == "generation"
    if not generates and workload.generation != GenerationSpec():
        return [Problem(("generation",), "needs mode: generation")]
    return []
