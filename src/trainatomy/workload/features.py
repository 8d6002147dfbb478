"""The features and facts of a workload that the rules of ``support.yaml`` name, beside its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainatomy.workload import preference, sentence_transformers
from trainatomy.workload.arguments import arguments, is_class_path, is_factory
from trainatomy.workload.deepspeed import zero_stage
from trainatomy.workload.defaults import peft_prepares
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.model import CUT_CROSS_ENTROPY, LORA_KERNELS
from trainatomy.workload.parallel import LOOPED
from trainatomy.workload.section import spell_dtype
from trainatomy.workload.trl import max_length, packing_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainatomy.workload.schema import Workload


_LIGER_LOSSES = (("fused_linear_cross_entropy", True), ("cross_entropy", False))
"""Losses of Liger, and whether it uses them by itself."""


def strategy_of(workload: Workload) -> str:
    """Return how a training is spread over data-parallel ranks: as its section says, or as the Trainer does."""
    train = workload.train
    by_trainer = "deepspeed" if train.deepspeed else "fsdp" if train.fsdp else "ddp"
    return workload.parallel.strategy or (by_trainer if LOOPS[workload.loop].by_trainer else "ddp")


def _fsdp_setting(workload: Workload, name: str, default: str) -> str:
    """Return a setting of ``train.fsdp_config`` as text, with or without ``fsdp_`` before its name."""
    config = workload.train.fsdp_config or {}
    return str(config.get(name) or config.get(f"fsdp_{name}") or default)


def _fsdp_version(workload: Workload) -> str | None:
    return _fsdp_setting(workload, "version", "2") if workload.train.fsdp else None


def _rounds(workload: Workload) -> int:
    """Return the rounds in which a schedule that interleaves stages runs the micro-batches."""
    return max(1, workload.microbatches // workload.parallel.pp_size)


def _saved(workload: Workload) -> str:
    """Return when checkpoints are saved; transformers' default is by steps."""
    return workload.train.save_strategy or "steps"


def _has_other_dtype(workload: Workload, key: str) -> bool:
    config = workload.model.config
    return key in config and spell_dtype(config[key]) != workload.model.dtype


def _skips_reductions(workload: Workload) -> bool:
    """Return whether micro-batches without a reduction come first, from which DDP cannot learn a static graph.

    Source: torch/csrc/distributed/c10d/reducer.cpp (it asserts ``expect_autograd_hooks_``), torch 2.13.
    """
    parallel = workload.parallel
    skips = workload.train.gradient_accumulation_steps > 1 and not parallel.sync_each_batch
    return strategy_of(workload) == "ddp" and skips and parallel.world_size > 1


def _is_data_parallel(workload: Workload) -> bool:
    """Return whether all ranks process different samples."""
    return workload.parallel.data_parallel_size == workload.parallel.world_size


def _is_plain_ddp(workload: Workload) -> bool:
    """Return whether every GPU holds the whole model: layers of 4 and 8 bits are not sharded."""
    parallel = workload.parallel
    is_alone = parallel.devices == 1 and _is_data_parallel(workload)
    return parallel.strategy in (None, "ddp") and is_alone and not workload.train.fsdp


def _is_packed_as_floats(workload: Workload) -> bool:
    spec = workload.model.quantization
    return spec is not None and "float" in str(spec.bnb_4bit_quant_storage)


def _shards_four_bits(workload: Workload) -> bool:
    """Return whether FSDP shards layers of 4 bits for a Trainer.

    FSDP2 leaves weights whole that are not packed as floats.  FSDP1 flattens the parameters of a layer, which therefore
    need one dtype: floats, without norms that peft casts to float32.  Adapters are layers of their own (peft's
    ``fsdp_auto_wrap_policy``).
    """
    spec, version = workload.model.quantization, _fsdp_version(workload)
    is_alone = workload.parallel.strategy is None and _is_data_parallel(workload)
    if not LOOPS[workload.loop].by_trainer or not is_alone or spec is None or not spec.load_in_4bit:
        return False
    is_flattened = version == "1" and _is_packed_as_floats(workload) and not peft_prepares(workload)
    return version == "2" or is_flattened


def _loads_whole_files(workload: Workload) -> bool:
    """Return whether whole files are loaded of a model some of whose packed weights are not sharded."""
    is_whole = _fsdp_setting(workload, "state_dict_type", "FULL_STATE_DICT").upper() == "FULL_STATE_DICT"
    return (workload.resumes or workload.loads_best_model) and is_whole and not _is_packed_as_floats(workload)


def _deals_out_lengths(workload: Workload) -> bool:
    """Return whether every rank takes batches of its own, in a training whose steps can be put together from others."""
    strategy = workload.parallel.strategy
    if workload.loop == "pytorch":
        return _is_data_parallel(workload) and strategy in (None, "ddp", "fsdp2")
    is_plain = strategy is None and _fsdp_version(workload) != "1"
    return workload.loop == "trainer" and _is_data_parallel(workload) and is_plain


def _is_cut_to_prompt(workload: Workload) -> bool:
    limit, prompt = max_length(workload), workload.data.prompt_length
    return limit is not None and prompt is not None and prompt >= limit and not workload.trl.get("packing")


def _leaves_no_answer(workload: Workload) -> bool:
    prompt, length = workload.data.prompt_length, workload.data.sequence_length
    return prompt is not None and length is not None and prompt >= length


FEATURES: Mapping[str, Callable[[Workload], bool]] = {
    "the Trainer": lambda w: LOOPS[w.loop].by_trainer,
    "TRL's trainers": lambda w: LOOPS[w.loop].settings is not None,
    "trainers on preferences": lambda w: w.loop == preference.LOOP,
    "a reference model": preference.has_reference_model,
    "sentence-transformers' trainer": lambda w: w.loop == sentence_transformers.LOOP,
    # Model and optimizer
    "model.config.dtype": lambda w: _has_other_dtype(w, "dtype"),
    "model.config.torch_dtype": lambda w: _has_other_dtype(w, "torch_dtype"),
    "quantised weights": lambda w: w.model.is_quantised,
    "weights quantised otherwise than in 4 bits": lambda w: (
        w.model.is_quantised and w.model.quantization is not None and not w.model.quantization.load_in_4bit
    ),
    "adapters with magnitudes or a bias": lambda w: (
        w.model.lora is not None and (w.model.lora.use_dora or w.model.lora.lora_bias)
    ),
    "kernels for adapters": lambda w: not set(LORA_KERNELS).isdisjoint(w.model.kernels),
    "cut cross-entropy": lambda w: CUT_CROSS_ENTROPY in w.model.kernels,
    "Liger's losses": lambda w: (
        w.train.use_liger_kernel
        and any((w.train.liger_kernel_config or {}).get(name, on) for name, on in _LIGER_LOSSES)
    ),
    "another library than bitsandbytes": lambda w: (
        w.model.quantization is not None and w.model.quantization.quant_method != "bitsandbytes"
    ),
    "an optimizer's function": lambda w: is_factory(w.train.optim),
    "an optimizer of your own": lambda w: is_class_path(w.train.optim) or is_factory(w.train.optim),
    "tuples in train.optim_args": lambda w: not {"(", "["}.isdisjoint(w.train.optim_args or ""),
    "float16 gradients": lambda w: w.cannot_unscale(w.model.dtype),
    # The step
    "train.torch_compile": lambda w: w.train.compiles,
    "train.gradient_checkpointing_kwargs.offload": lambda w: w.train.offloads_checkpoints,
    "batches that vary": lambda w: w.data.varies,
    "experts in 4 bits": lambda w: w.model.quantization is not None and w.model.quantization.bnb_4bit_experts,
    "adapters on parameters": lambda w: w.model.lora is not None and bool(w.model.lora.target_parameters),
    "media that differ": lambda w: w.data.varying_media,
    "images that differ": lambda w: w.data.lengths is not None and w.data.lengths.kind == "images",
    "more steps than skipped ones": lambda w: w.steps is None or w.skipped_steps < w.steps,
    "sampling": lambda w: w.generation.do_sample,
    "enough beams": lambda w: w.generation.num_return_sequences <= w.generation.num_beams,
    # Evaluation and checkpoints
    "evaluation": lambda w: w.evaluates,
    "saving": lambda w: w.saves,
    "resuming": lambda w: w.resumes,
    "an evaluation or a checkpoint between the steps": lambda w: w.pauses,
    "gathered outputs": lambda w: w.gathers_outputs,
    "checkpoints that are evaluated": lambda w: w.train.eval_strategy == _saved(w),
    "a checkpoint of whole files": _loads_whole_files,
    # Several GPUs
    "several GPUs": lambda w: w.parallel.world_size > 1,
    "several data-parallel ranks": lambda w: w.parallel.data_parallel_size > 1,
    "all GPUs in parallel.tp_size": lambda w: w.parallel.tp_size == w.parallel.world_size,
    "replicas": lambda w: w.parallel.replicas > 1,
    "fewer replicas than ranks": lambda w: w.parallel.dp_replicate_size not in (None, w.parallel.data_parallel_size),
    "whole weights on each rank": lambda w: not strategy_of(w).startswith("fsdp"),
    "ZeRO-3": lambda w: zero_stage(w.train.deepspeed) == 3,
    "DDP": lambda w: w.parallel.strategy in (None, "ddp", "zero1"),
    "DDP alone": _is_plain_ddp,
    "DataParallel": lambda w: w.parallel.strategy == "dp",
    "train.fsdp with FSDP2": lambda w: _fsdp_version(w) == "2",
    "4 bits by the Trainer's FSDP": _shards_four_bits,
    "a number of ranks in parallel.reshard_after_forward": lambda w: type(w.parallel.reshard_after_forward) is int,
    "all_but_last in parallel.reshard_after_forward": lambda w: w.parallel.reshard_after_forward == "all_but_last",
    "micro-batches without a reduction": _skips_reductions,
    "batches for each rank": _deals_out_lengths,
    "an AMD GPU": lambda w: w.resolve_gpu().is_amd,
    "an optimizer of torchao": lambda w: (
        not is_factory(w.train.optim) and arguments().package_of(w.train.optim) == "torchao"
    ),
    "a MIG instance": lambda w: bool(w.resolve_gpu().slice_of),
    "gpu.power_limit_watts": lambda w: getattr(w.gpu, "power_limit_watts", None) is not None,
    # Pipelines
    "a pipeline": lambda w: w.parallel.pp_size > 1,
    "a looped schedule": lambda w: w.parallel.schedule in LOOPED,
    "several stages on each rank": lambda w: w.parallel.stages_per_rank > 1,
    "a batch that micro-batches divide": lambda w: w.batch_size % w.microbatches == 0,
    "1F1B with fewer micro-batches than stages": lambda w: (
        w.parallel.schedule == "1F1B" and w.microbatches < w.parallel.stages
    ),
    "rounds that are not whole": lambda w: (
        w.parallel.schedule.startswith("Interleaved") and w.microbatches % _rounds(w) > 0
    ),
    # TRL
    "trl.packing": lambda w: packing_strategy(w) is not None,
    "packs cut anywhere": lambda w: packing_strategy(w) in ("bfd_split", "wrapped"),
    "samples of any length": lambda w: max_length(w) is None,
    "samples longer than trl.max_length": lambda w: (w.data.sequence_length or 0) > (max_length(w) or float("inf")),
    "samples cut to their prompt": _is_cut_to_prompt,
    "no room for an answer": _leaves_no_answer,
    "pairs of neighbours": lambda w: w.loop == "kto" and w.trl.get("loss_type", "kto") == "kto",
}
"""What rules name beside settings; a name with a dot is a setting that counts in another way."""

FACTS: Mapping[str, Callable[[Workload], Any]] = {
    "w": lambda w: w,
    "strategy": lambda w: w.parallel.strategy or "ddp",
    "spread": strategy_of,
    "rounds": _rounds,
    "looped": lambda w: ", ".join(sorted(LOOPED)),
    "saved": _saved,
    "max_length": max_length,
    "packing": packing_strategy,
}
"""What messages say of a workload in braces; ``{w.loop}`` is a property of the workload itself."""
