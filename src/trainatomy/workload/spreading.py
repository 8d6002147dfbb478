"""Trainings that cannot be spread over several GPUs: each function returns problems of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainatomy.results.prediction import fsdp_version
from trainatomy.workload.arguments import is_factory
from trainatomy.workload.deepspeed import deepspeed_problems
from trainatomy.workload.document import suggestion
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.parallel import CP_STRATEGY, ParallelSpec
from trainatomy.workload.section import Problem
from trainatomy.workload.train import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainatomy.workload.schema import Workload

_BY_TRAINER = {
    "strategy": "belongs to loop: pytorch, except dp; the Trainer uses DDP, or has train.fsdp and train.deepspeed",
    "gradient_as_bucket_view": "belongs to loop: pytorch; the Trainer does not set it",
    "static_graph": "belongs to loop: pytorch; the Trainer takes train.ddp_static_graph",
    "find_unused_parameters": "belongs to loop: pytorch; the Trainer takes train.ddp_find_unused_parameters",
    "bucket_cap_mb": "belongs to loop: pytorch; the Trainer takes train.ddp_bucket_cap_mb",
    "broadcast_buffers": "belongs to loop: pytorch; the Trainer takes train.ddp_broadcast_buffers",
    "reshard_after_forward": "belongs to loop: pytorch; the Trainer takes it in train.fsdp_config",
    "mp_policy": "belongs to loop: pytorch; the Trainer takes train.bf16 or train.fp16",
    "transformer_layer_cls_to_wrap": "belongs to loop: pytorch; the Trainer takes it in train.fsdp_config",
    "offload_policy": "belongs to loop: pytorch; the Trainer takes cpu_offload in train.fsdp_config",
    "sync_each_batch": "belongs to loop: pytorch; the Trainer reduces gradients after the last micro-batch only",
    "enable_expert_parallel": "is simulated with loop: pytorch only",
    "sequence_parallel": "belongs to loop: pytorch; the Trainer does not set it",
    "pp_size": "belongs to loop: pytorch: the Trainer runs no pipelines",
}
"""Options of ``parallel`` that the Trainer does not take, with what it takes instead."""
_FSDP_CONFIG = frozenset(
    "activation_checkpointing auto_wrap_policy backward_prefetch cpu_offload cpu_ram_efficient_loading "
    "forward_prefetch limit_all_gathers min_num_params reshard_after_forward state_dict_type sync_module_states "
    "transformer_layer_cls_to_wrap use_orig_params version".split()
)
"""Keys that ``TrainingArguments`` reads from ``fsdp_config`` (transformers 5.17), with or without ``fsdp_``."""

SHARDING_STRATEGY = "sharding_strategy"
"""A key of ours in ``fsdp_config``: the variable ``FSDP_SHARDING_STRATEGY``, which ``accelerate launch`` sets.

For FSDP1, accelerate 1.15 reads this variable instead of ``reshard_after_forward``, which transformers gives it.
"""
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_OFFLOADED = "gradient_checkpointing: true with gradient_checkpointing_kwargs: {offload: true}"

_STATE_DICTS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
"""Checkpoints of FSDP that are simulated."""


def spreading_problems(workload: Workload) -> list[Problem]:
    """Refuse what the loop cannot spread over several GPUs."""
    parallel, train = workload.parallel, workload.train
    if parallel.world_size > 1 and workload.mode != "training":
        return [Problem(("parallel",), f"{workload.mode} on several GPUs is not simulated: without it, one GPU is")]
    if workload.mode != "training":
        return []
    by_trainer = "deepspeed" if train.deepspeed else "fsdp" if train.fsdp else "ddp"
    strategy = parallel.strategy or (by_trainer if LOOPS[workload.loop].by_trainer else "ddp")
    grouped = [] if strategy.startswith("fsdp") else parallel.ungrouped(strategy)
    problems = [Problem(("parallel", *each.path), each.message) for each in grouped]
    problems += _pipeline(workload) if parallel.pp_size > 1 else []
    if parallel.sequence_parallel and workload.data.padding:
        reason = "needs an attention mask, which models of transformers do not take with shards of a sequence"
        problems.append(Problem(("data", "padding"), f"{reason}: leave it out, or parallel.sequence_parallel"))
    if parallel.cp_size > 1 and workload.data.padding:
        reason = "needs an attention mask, which ring attention does not take: leave it out, or parallel.cp_size"
        problems.append(Problem(("data", "padding"), reason))
    if parallel.cp_size > 1 and workload.loop == "pytorch" and parallel.strategy is None:
        problems.append(Problem(("parallel", "cp_size"), f"{CP_STRATEGY}; the strategy is ddp"))
    problems += _static_graph(workload, strategy)
    if train.fp16 and parallel.tp_size > 1 and parallel.pp_size == 1 and strategy != "fsdp2":
        reason = "needs a gradient scaler for sharded and whole weights, which PyTorch's is not: use bf16, or fsdp2"
        problems.append(Problem(("train", "fp16"), f"{reason} with parallel.tp_size"))
    return problems + (_spread_by_trainer(workload) if LOOPS[workload.loop].by_trainer else [])


def _static_graph(workload: Workload, strategy: str) -> list[Problem]:
    """Refuse micro-batches without a reduction before the first one: DDP's static graph is learned in it.

    Source: torch/csrc/distributed/c10d/reducer.cpp (it asserts ``expect_autograd_hooks_``), torch 2.13.
    """
    parallel, train = workload.parallel, workload.train
    by_trainer = LOOPS[workload.loop].by_trainer
    static = train.ddp_static_graph if by_trainer else parallel.static_graph
    alone = train.gradient_accumulation_steps == 1 or parallel.sync_each_batch
    if strategy != "ddp" or not static or alone or parallel.world_size == 1:
        return []
    here = ("train", "ddp_static_graph") if by_trainer else ("parallel", "static_graph")
    reason = "fails in PyTorch with gradients that are accumulated without a reduction (no_sync)"
    other = "" if by_trainer else ", or set parallel.sync_each_batch"
    return [Problem(here, f"{reason}: leave it out{other}")]


def _pipeline(workload: Workload) -> list[Problem]:
    """Refuse batches that the pipeline's schedule cannot divide, and settings that it has no place for."""
    parallel, train, count = workload.parallel, workload.train, workload.microbatches
    here, problems = ("parallel", "pp_microbatches"), []
    if workload.batch_size % count:
        problems.append(Problem(here, f"{count} does not divide the batch of {workload.batch_size} samples"))
    if parallel.schedule == "1F1B" and count < parallel.stages:
        reason = f"1F1B needs at least as many micro-batches as stages ({parallel.stages}), found {count}"
        problems.append(Problem(here, f"{reason}: use more, or pp_schedule: GPipe"))
    rounds = max(1, count // parallel.pp_size)
    if parallel.schedule.startswith("Interleaved") and count % rounds:
        reason = f"{parallel.schedule} runs {count} micro-batches in {rounds} rounds, which do not divide them"
        problems.append(Problem(here, f"{reason}: use a multiple of pp_size ({parallel.pp_size})"))
    if train.gradient_accumulation_steps > 1:
        reason = "is 1 with a pipeline, which accumulates gradients over parallel.pp_microbatches"
        problems.append(Problem(("train", "gradient_accumulation_steps"), reason))
    if train.fp16:
        reason = "needs a gradient scaler that all stages share, which PyTorch does not have: use bf16"
        problems.append(Problem(("train", "fp16"), reason))
    if workload.model.lora is not None:
        problems.append(Problem(("model", "lora"), "is not simulated in a pipeline"))
    if getattr(workload.gpu, "power_limit_watts", None) is not None:
        problems.append(Problem(("gpu", "power_limit_watts"), "is not simulated in a pipeline"))
    return problems


def _spread_by_trainer(workload: Workload) -> list[Problem]:
    """Refuse what the Trainer cannot spread over several GPUs."""
    parallel, train = workload.parallel, workload.train
    defaults = {name: field.default for name, field in ParallelSpec.model_fields.items()}
    problems = [
        Problem(("parallel", name), instead)
        for name, instead in _BY_TRAINER.items()
        if getattr(parallel, name) != defaults[name] and (name, parallel.strategy) != ("strategy", "dp")
    ]
    if parallel.strategy == "dp":
        problems += _not_for_data_parallel(workload)
    problems += [] if train.deepspeed is None else _deepspeed(workload, train.deepspeed)
    if train.fsdp and is_factory(train.optim):
        reason = "makes an optimizer before the Trainer shards the model, which it refuses with FSDP: name a class"
        problems.append(Problem(("train", "optim"), f"{train.optim} {reason}"))
    if train.fsdp and parallel.world_size == 1:
        problems.append(Problem(("train", "fsdp"), "shards over several GPUs: set parallel.gpus"))
    if parallel.cp_size > 1:
        problems += _contexts_by_trainer(workload)
    if parallel.tp_size > 1:
        problems += [Problem(("parallel", "tp_size"), reason) for reason in _not_with_shared_matrices(workload)]
    return problems + (_fsdp_config(workload) if train.fsdp else [])


def _not_with_shared_matrices(workload: Workload) -> Iterator[str]:
    """Yield what the Trainer's tensor parallelism is not simulated with."""
    train, parallel = workload.train, workload.parallel
    if train.fsdp or train.deepspeed or parallel.tp_size != parallel.world_size:
        yield "takes all GPUs with the Trainer: set it to their number, without fsdp and deepspeed"
    if workload.pauses or workload.evaluates or workload.resumes:
        yield "is not simulated together with evaluation, saving and resuming by the Trainer: leave one of them out"
    if workload.model.lora is not None or workload.model.quantization is not None:
        yield "is not simulated with LoRA or quantised weights and the Trainer: leave one of them out"


def _contexts_by_trainer(workload: Workload) -> list[Problem]:
    """Refuse what accelerate does not combine with context parallelism, and what is not simulated with it."""
    train, here = workload.train, ("parallel", "cp_size")
    problems = []
    config = train.fsdp_config or {}
    if not train.fsdp or str(config.get("version", config.get("fsdp_version", 2))) != "2":
        problems.append(Problem(here, "needs FSDP2, as accelerate runs it: set train.fsdp"))
    if workload.pauses or workload.evaluates:
        problems.append(Problem(here, "is not simulated together with evaluation or saving: leave one of them out"))
    return problems


def _not_for_data_parallel(workload: Workload) -> list[Problem]:
    """Refuse settings of other strategies, which the Trainer ignores or refuses when it uses DataParallel."""
    defaults = {name: field.default for name, field in TrainSpec.model_fields.items()}
    return [
        Problem(("train", name), "belongs to DDP, FSDP or DeepSpeed, but parallel.strategy is dp: leave it out")
        for name in defaults
        if name.startswith(("fsdp", "ddp_", "deepspeed")) and getattr(workload.train, name) != defaults[name]
    ]


def _deepspeed(workload: Workload, config: Mapping[str, Any]) -> list[Problem]:
    """Refuse what DeepSpeed does not do, and what is not simulated."""
    here = ("train", "deepspeed")
    problems = [Problem((*here, *each.path), each.message) for each in deepspeed_problems(config)]
    if workload.train.fsdp:
        problems.append(Problem(("train", "fsdp"), "cannot be combined with deepspeed: choose one of the two"))
    if workload.saves:
        problems.append(Problem(("train", "save_strategy"), "saving is not simulated with deepspeed: leave it out"))
    if workload.resumes:
        message = "resuming is not simulated with deepspeed: leave it out"
        problems.append(Problem(("train", "resume_from_checkpoint"), message))
    if workload.data.lengths is not None:
        problems.append(Problem(("data", "lengths"), "are not simulated with deepspeed: give data.sequence_length"))
    return problems


def _fsdp_config(workload: Workload) -> list[Problem]:
    """Refuse keys that transformers would ignore, and what is not simulated."""
    here, problems = ("train", "fsdp_config"), []
    for key, value in (workload.train.fsdp_config or {}).items():
        name = key.removeprefix("fsdp_")
        if name.startswith("xla") and value:
            problems.append(Problem((*here, key), "is about TPUs, which are not simulated"))
        elif key == SHARDING_STRATEGY:
            problems += _sharding_problems((*here, key), value, workload.train.fsdp_config or {})
        elif name == "activation_checkpointing_offload":
            if str(value).lower() in ("true", "1"):
                message = "is not passed on to accelerate by TrainingArguments (transformers 5.17)"
                problems.append(Problem((*here, key), f"{message}: use train.{_OFFLOADED}"))
        elif name == "state_dict_type" and workload.saves and str(value).upper() not in _STATE_DICTS:
            message = f"saving is simulated with {' and '.join(_STATE_DICTS)}, found {value}"
            problems.append(Problem((*here, key), message))
        elif name not in _FSDP_CONFIG and not name.startswith("xla"):
            problems.append(Problem((*here, key), f"unknown key{suggestion(name, _FSDP_CONFIG)}"))
        elif name == "version" and str(value) not in ("1", "2"):
            problems.append(Problem((*here, key), f"must be 1 or 2, found {value!r}"))
    return problems


def _sharding_problems(here: tuple[str, ...], value: Any, config: Mapping[str, Any]) -> list[Problem]:
    """Refuse a strategy of FSDP1 that does not exist, or with FSDP2."""
    if fsdp_version(config) != 1:
        return [Problem(here, "is FSDP1's (version: 1); with FSDP2, use reshard_after_forward")]
    if str(value).upper() not in _STRATEGIES:
        return [Problem(here, f"must be one of {', '.join(_STRATEGIES)}, found {value!r}")]
    return []
