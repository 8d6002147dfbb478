"""Accelerate's configuration, from a file or from the options of ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.workload import launch_deepspeed
from trainatomy.workload.launch_settings import PRECISIONS, Launch, count, is_true
from trainatomy.workload.nearest import suggestion
from trainatomy.workload.spreading import SHARDING_STRATEGY

_MULTI_GPU = frozenset({"MULTI_GPU", "FSDP", "DEEPSPEED"})
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
_ACCELERATE_TO_TRAINER = {"offload_params": "cpu_offload", "backward_prefetch_policy": "backward_prefetch"}
"""Keys of accelerate's ``fsdp_config``, without ``fsdp_``, that ``TrainingArguments`` calls otherwise."""
_SHARDING = {"1": "full_shard", "2": "shard_grad_op", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
"""Sharding strategies by their numbers in older accelerate configurations."""


def launch_of(content: Any, source: str) -> Launch:
    """Return what accelerate's configuration says; refuse what is not simulated."""
    if not isinstance(content, Mapping):
        raise WorkloadError(f"{source}: an accelerate configuration is a mapping of keys to values", key="launch")
    _refuse(content, source)
    kind = str(content.get("distributed_type", "NO")).upper()
    processes = count(content.get("num_processes", 1), "num_processes")
    nodes = count(content.get("num_machines", 1), "num_machines")
    if processes % nodes:
        raise _contradiction(source, f"num_processes {processes} is no multiple of num_machines {nodes}")
    if kind == "NO" and processes > 1:
        raise _contradiction(source, f"distributed_type is NO, but num_processes is {processes}")
    gpu_ids = content.get("gpu_ids")
    if isinstance(gpu_ids, str) and gpu_ids != "all" and len(gpu_ids.split(",")) < processes // nodes:
        raise _contradiction(source, f"gpu_ids names {gpu_ids}, fewer GPUs than num_processes {processes}")
    precision = str(content.get("mixed_precision", "no")).lower()
    sizes = {
        name: count(value, key)
        for key, value in _parallelism(content).items()
        if (name := key.removeprefix("parallelism_config_")) in _SIZES and str(value) != "1"
    }
    fsdp = _fsdp(content.get("fsdp_config") or {}) if kind == "FSDP" else None
    precision_name = precision if precision in PRECISIONS else None
    deepspeed = None
    if kind == "DEEPSPEED":
        deepspeed = launch_deepspeed.of_accelerate(content.get("deepspeed_config") or {}, precision_name, source)
    if kind != "FSDP" and sizes.get("dp_shard_size"):
        raise _contradiction(source, f"dp_shard_size is {sizes['dp_shard_size']}, but distributed_type is {kind}")
    compiles = _compiler(content)["dynamo_backend"] != "NO"
    return Launch(source, processes // nodes, nodes, precision_name, fsdp, deepspeed, sizes, compiles)


_KEYS = frozenset(
    "compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_backend dynamo_config "
    "enable_cpu_affinity fp8_config fsdp_config gpu_ids machine_rank main_process_ip main_process_port "
    "main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes "
    "parallelism_config rdzv_backend same_network use_cpu".split()
)
"""Keys of a configuration (accelerate 1.15, ``ClusterConfig``); ``dynamo_backend`` belongs to old ones."""
_COMPILED: Mapping[str, tuple[str, ...]] = {
    "dynamo_backend": ("NO", "INDUCTOR"),
    "dynamo_mode": ("DEFAULT",),
    "dynamo_use_fullgraph": ("FALSE", "TRUE"),
    "dynamo_use_dynamic": ("FALSE",),
    "dynamo_use_regional_compilation": ("FALSE",),
}
"""Settings of the compiler that are simulated, accelerate's defaults first."""
_OF_TPU = ("tpu_", "command")


def _parallelism(content: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in (content.get("parallelism_config") or {}).items()}


def _refuse(content: Mapping[str, Any], source: str) -> None:
    """Refuse by name what changes memory or time and is not simulated, and keys that accelerate does not know."""
    unknown = [str(key) for key in content if key not in _KEYS and not str(key).startswith(_OF_TPU)]
    if unknown:
        raise WorkloadError(
            f"{source}: {unknown[0]}: not a key of accelerate's configuration{suggestion(unknown[0], _KEYS)}",
            key="launch",
        )
    kind = str(content.get("distributed_type", "NO")).upper()
    if kind not in _MULTI_GPU | {"NO"}:
        raise WorkloadError(
            f"{source}: distributed_type: {kind} is not simulated; MULTI_GPU, FSDP and DEEPSPEED are", key="launch"
        )
    if is_true(content.get("use_cpu")):
        raise WorkloadError(f"{source}: use_cpu: a prediction is of GPU memory", key="launch")
    precision = str(content.get("mixed_precision", "no")).lower()
    if precision not in (*PRECISIONS, "no", "none"):
        raise WorkloadError(f"{source}: mixed_precision: {precision} is not simulated; fp16 and bf16 are", key="launch")
    for name, value in _compiler(content).items():
        if value not in _COMPILED[name]:
            raise WorkloadError(
                f"{source}: {name}: {value} is not simulated; {_COMPILED[name][-1]} is (train.torch_compile)",
                key="launch",
            )
    if str(_parallelism(content).get("parallelism_config_sp_size", 1)) != "1":
        raise WorkloadError(f"{source}: parallelism_config_sp_size is not simulated", key="launch")
    rotation = str(_parallelism(content).get("parallelism_config_cp_comm_strategy", "allgather"))
    if rotation != "allgather":
        message = f"parallelism_config_cp_comm_strategy: {rotation} is not read here; set parallel.cp_comm_strategy"
        raise WorkloadError(f"{source}: {message}, and leave it out", key="launch")


def _compiler(content: Mapping[str, Any]) -> dict[str, str]:
    """Return accelerate's settings of the compiler, in capitals; its defaults where they are missing."""
    given = {**(content.get("dynamo_config") or {})}
    given.setdefault("dynamo_backend", content.get("dynamo_backend", "NO"))
    return {name: str(given.get(name, known[0])).upper() for name, known in _COMPILED.items()}


def _fsdp(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return accelerate's settings of FSDP with the names of ``TrainingArguments.fsdp_config``."""
    found: dict[str, Any] = {"version": 1}  # accelerate's default
    for key, value in raw.items():
        name = str(key).removeprefix("fsdp_")
        found[_ACCELERATE_TO_TRAINER.get(name, name)] = value
    found["version"] = int(found["version"])
    strategy = found.pop("sharding_strategy", None)
    if strategy is not None and found["version"] == 1:
        found["reshard_after_forward"] = _SHARDING.get(str(strategy), str(strategy).lower())
        if found["reshard_after_forward"] != "full_shard":
            found[SHARDING_STRATEGY] = found["reshard_after_forward"].upper()
    policy = found.get("auto_wrap_policy")
    if isinstance(found.get("transformer_layer_cls_to_wrap"), str):
        found["transformer_layer_cls_to_wrap"] = found["transformer_layer_cls_to_wrap"].split(",")
    if policy is not None and str(policy).upper() == "SIZE_BASED_WRAP":
        found["min_num_params"] = int(found.get("min_num_params", 0))
    return found


def _contradiction(source: str, message: str) -> WorkloadError:
    return WorkloadError(f"{source}: {message}", key="launch")
