"""DeepSpeed's configuration (``train.deepspeed``): read it, and refuse by name what is not simulated.

The names are those of DeepSpeed 0.19 (deepspeed/runtime/config.py and runtime/zero/config.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from pydantic_core import PydanticCustomError

from trainatomy.workload.document import nearest, suggestion
from trainatomy.workload.section import Problem

REPORTS = (
    "tensorboard wandb csv_monitor comet steps_per_print dump_state memory_breakdown comms_logger checkpoint".split()
)
"""Sections about logs, reports and files, which a prediction and a measurement leave out."""

_ZERO = "zero_optimization"
_SECTIONS = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler fp16 bf16 "
    "bfloat16 gradient_clipping zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "graph_harvesting communication_data_type seq_parallel_comm_data_type prescale_gradients "
    "gradient_predivide_factor disable_allgather vocabulary_size data_types dataloader_drop_last "
    "use_data_before_expert_parallelism activation_checkpointing aio sequence_parallel_size data_parallel_size timers "
    "nebula".split()
)
"""Other keys of a configuration (deepspeed/runtime/constants.py).  DeepSpeed leaves out what it does not know."""
_STAGE_3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold allgather_sequential "
    "use_all_reduce_for_fetch_params".split()
)
"""Options that may have ``stage3_`` before their names (``DeepSpeedZeroConfig``: aliases, ``populate_by_name``)."""
_OPTIONS = frozenset(
    "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param "
    "offload_optimizer sub_group_size cpu_offload cpu_offload_param cpu_offload_use_pin_memory "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks leaf_module save_muon_momentum_buffer_in_memory".split()
) | {f"{prefix}{name}" for name in _STAGE_3 for prefix in ("", "stage3_")}
_PLUS_PLUS = "belongs to ZeRO++, which is not simulated"
_REFUSED_OPTIONS: Mapping[str, str] = {
    "zero_quantized_weights": _PLUS_PLUS,
    "zero_quantized_nontrainable_weights": _PLUS_PLUS,
    "zero_quantized_gradients": _PLUS_PLUS,
    "zero_hpz_partition_size": _PLUS_PLUS,
    "mics_shard_size": "belongs to MiCS, which is not simulated",
    "mics_hierarchical_params_gather": "belongs to MiCS, which is not simulated",
    "zenflow": "is not simulated",
}
"""Options of ``zero_optimization`` that are refused unless they are off."""
_REFUSED_SECTIONS: Mapping[str, str] = {
    "amp": "NVIDIA's apex is not simulated; use bf16 or fp16",
    "torch_autocast": "is not simulated; use bf16 or fp16",
    "autotuning": "runs many training runs; leave it out",
    "compile": "compiled graphs are not simulated",
    "compression_training": "is not simulated",
    "curriculum_learning": "is not simulated: every batch has the full length",
    "data_efficiency": "is not simulated: every batch has the full length",
    "eigenvalue": "is not simulated",
    "elasticity": "is not simulated: the number of GPUs is fixed",
    "expert_parallel": "experts on different GPUs are not simulated",
    "flops_profiler": "is not simulated; leave it out",
    "hybrid_engine": "is not simulated",
    "pipeline": "DeepSpeed's pipelines are not simulated",
    "progressive_layer_drop": "is not simulated",
    "quantize_training": "is not simulated",
    "sparse_attention": "is not simulated",
    "sparse_gradients": "is not simulated",
    "tensor_parallel": "DeepSpeed's tensor parallelism is not simulated; parallel.tp_size is, with loop: pytorch",
    "wall_clock_breakdown": "waits for the GPU to take times; leave it out",
    "zenflow": "is not simulated",
}
_OPTIMIZERS = ("Adam", "AdamW")


def read_deepspeed(value: Any) -> Any:
    """Return a configuration as a mapping; a string is the path of a JSON file, or empty for none."""
    if isinstance(value, str):
        return None if value.lower() in ("", "none", "no", "false") else _read(value)
    return value or None


def _read(file: str) -> Any:
    try:
        return json.loads(FilePath(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise PydanticCustomError("deepspeed", "cannot read {text}", {"text": f"{file}: {error.strerror}"}) from None
    except UnicodeDecodeError as error:
        raise PydanticCustomError("deepspeed", "cannot read {text}", {"text": f"{file}: {error}"}) from None
    except json.JSONDecodeError as error:
        raise PydanticCustomError("deepspeed", "is no JSON: {text}", {"text": f"{file}: {error}"}) from None


def zero_stage(config: Mapping[str, Any] | None) -> int:
    """Return the stage of ZeRO that a configuration asks for; 0 without one."""
    section = (config or {}).get(_ZERO)
    return int(section.get("stage", 0)) if isinstance(section, Mapping) else 0


def offloads(config: Mapping[str, Any]) -> bool:
    """Return whether states or weights are kept in host memory."""
    section = config.get(_ZERO)
    return isinstance(section, Mapping) and any(
        not _is_off(_device(section, name)) for name in ("offload_optimizer", "offload_param")
    )


def deepspeed_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Return what is wrong with a configuration, or not simulated; paths are relative to it."""
    return [*_sections(config), *_optimizer(config), *_zero(config)]


def _is_off(value: Any) -> bool:
    """Return whether a value switches its setting off: a size of 1 is a group of one rank."""
    if isinstance(value, Mapping):
        return not value or _is_off(value.get("enabled", True))
    return not value or value == "none" or (value == 1 and value is not True)


def _sections(config: Mapping[str, Any]) -> Iterator[Problem]:
    for name, reason in _REFUSED_SECTIONS.items():
        value = config.get(name)
        if name == "tensor_parallel" and isinstance(value, Mapping):
            value = value.get("autotp_size", 1)
        if not _is_off(value):
            yield Problem((name,), reason)
    known = _SECTIONS | {*REPORTS, *_REFUSED_SECTIONS}
    for name in config:
        if name not in known and nearest(str(name), known):  # others are no typing errors, and DeepSpeed ignores them
            yield Problem((str(name),), f"unknown key{suggestion(str(name), known)}")
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(config):
        reason = 'is missing: DeepSpeed needs it, or train_batch_size; "auto" takes the Trainer\'s'
        yield Problem(("train_micro_batch_size_per_gpu",), reason)
    if not _is_off(config.get("sequence_parallel_size", 1)):
        yield Problem(("sequence_parallel_size",), "sequence parallelism is not simulated")


def _optimizer(config: Mapping[str, Any]) -> Iterator[Problem]:
    section = config.get("optimizer")
    if section is None:
        return
    kind = section.get("type") if isinstance(section, Mapping) else section
    if kind not in _OPTIMIZERS:
        shown = " and ".join(_OPTIMIZERS)
        reason = f"{kind!r} of DeepSpeed is not simulated; {shown} are, and train.optim without this section"
        yield Problem(("optimizer", "type"), reason)


def _zero(config: Mapping[str, Any]) -> Iterator[Problem]:
    section = config.get(_ZERO)
    if not isinstance(section, Mapping):
        yield Problem((_ZERO,), "must be a mapping with a stage, such as {stage: 2}; accelerate needs it")
        return
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        yield Problem((_ZERO, "stage"), f"must be 0, 1, 2 or 3, found {stage!r}")
    for name, value in section.items():
        if name in _REFUSED_OPTIONS:
            if not _is_off(value):
                yield Problem((_ZERO, name), _REFUSED_OPTIONS[name])
        elif name not in _OPTIONS:
            yield Problem((_ZERO, name), f"unknown key{suggestion(name, _OPTIONS)}")
    yield from _offload(section, stage)
    if isinstance(drive := config.get("aio"), Mapping) and drive.get("use_gds"):
        yield Problem(("aio", "use_gds"), "GPUDirect Storage is not simulated; leave it out")


def _device(section: Mapping[str, Any], name: str) -> Any:
    offload = section.get(name)
    return offload.get("device", "none") if isinstance(offload, Mapping) else offload


def _offload(section: Mapping[str, Any], stage: Any) -> Iterator[Problem]:
    for name in ("offload_optimizer", "offload_param"):
        device = _device(section, name)
        here = (_ZERO, name, "device")
        if not _is_off(device) and device not in ("cpu", "nvme"):
            yield Problem(here, f"must be none, cpu or nvme, found {device!r}")
        elif not _is_off(device) and stage != 3 and (name == "offload_param" or device == "nvme"):
            yield Problem(here, f"needs stage 3, found stage {stage}")
        elif device == "nvme" and not section[name].get("nvme_path"):
            yield Problem((_ZERO, name, "nvme_path"), "is missing: the folder on the drive")
        elif device == "cpu" and stage == 0:
            yield Problem(here, "needs stage 1, 2 or 3, found stage 0")
    options = section.get("offload_optimizer")
    if isinstance(options, Mapping):
        if options.get("ratio", 1) != 1:
            yield Problem((_ZERO, "offload_optimizer", "ratio"), "is not simulated; 1 (all states) is")
        if options.get("super_offload"):
            yield Problem((_ZERO, "offload_optimizer", "super_offload"), "is not simulated")
