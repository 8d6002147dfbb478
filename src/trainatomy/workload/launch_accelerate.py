"""Accelerate's configuration, from a file or from the options of ``accelerate launch``.

Settings that a launcher decides, and the keys of a workload that say the same.

Settings of DeepSpeed that launchers make: accelerate's ``deepspeed_config``, and the command ``deepspeed``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic_core import PydanticCustomError

from trainatomy.errors import WorkloadError
from trainatomy.workload.deepspeed import read_deepspeed
from trainatomy.workload.document import suggestion
from trainatomy.workload.fsdp import SHARDING_STRATEGY
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.section import Path

PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
_BY_TRAINER = "is simulated with loop: trainer and those of TRL only"
_NOT_PLAIN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "reshard_after_forward": (("true", "false", "full_shard", "shard_grad_op"), _BY_TRAINER),
    "activation_checkpointing": (("false",), "with loop: pytorch, use train.gradient_checkpointing"),
    "auto_wrap_policy": (("transformer_based_wrap",), "loop: pytorch wraps each layer"),
    "backward_prefetch": (("backward_pre", "none"), _BY_TRAINER),
    "forward_prefetch": (("false",), _BY_TRAINER),
    "use_orig_params": (("true",), _BY_TRAINER),
    "limit_all_gathers": (("true",), _BY_TRAINER),
    "activation_checkpointing_offload": (("false",), "is not simulated"),
    "ignored_modules": (("none", ""), "is not simulated"),
}
"""Settings of FSDP that ``loop: pytorch`` has one value of: what it does, and what to say of another."""
_PLAIN = frozenset({"version", "cpu_offload", "transformer_layer_cls_to_wrap", "min_num_params"})
"""Settings of FSDP that ``loop: pytorch`` takes, ``min_num_params`` with a policy that is refused anyway."""
_LOADING = frozenset({"state_dict_type", "sync_module_states", "cpu_ram_efficient_loading"})
"""Settings of FSDP that change how a model is loaded and saved, but nothing of a step."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings read from a launcher.

    Attributes:
        source: File or command, for messages.
        gpus: GPUs of each machine.
        nodes: Machines.
        mixed_precision: ``fp16``, ``bf16`` or None.
        fsdp: Settings of FSDP with the keys of ``TrainingArguments.fsdp_config``; None without FSDP.
        deepspeed: DeepSpeed's configuration; None without DeepSpeed.
        sizes: Degrees of parallelism, by their keys in the section ``parallel``.
        compiler: Settings of the compiler with the keys of the section ``train``, where accelerate compiles the model
            (``dynamo_backend: INDUCTOR``).
    """

    source: str
    gpus: int
    nodes: int = 1
    mixed_precision: str | None = None
    fsdp: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    compiler: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, loop: str) -> dict[Path, Any]:
        """Return the keys of a workload that say the same, for one of its loops."""
        found: dict[Path, Any] = {("parallel", "gpus"): self.gpus}
        if self.nodes > 1:
            found["parallel", "nodes"] = self.nodes
        found |= {("parallel", name): size for name, size in self.sizes.items()}
        found |= {("train", name): value for name, value in self.compiler.items()}
        if self.deepspeed is not None:
            if not _by_trainer(loop):
                raise WorkloadError(f"{self.source}: DeepSpeed {_BY_TRAINER}", key="launch")
            return found | self._precision() | {("train", "deepspeed"): dict(self.deepspeed)}
        if self.fsdp is None:
            return found | self._precision()
        if _by_trainer(loop):
            return found | self._precision() | {("train", "fsdp"): True, ("train", "fsdp_config"): dict(self.fsdp)}
        return found | self._plain_fsdp()

    def _precision(self) -> dict[Path, Any]:
        return {} if self.mixed_precision is None else {("train", self.mixed_precision): True}

    def _refuse_for_plain_loop(self, fsdp: Mapping[str, Any]) -> None:
        """Refuse what ``loop: pytorch`` does not do; without it, its defaults would be simulated in silence."""
        for name, (usual, reason) in _NOT_PLAIN.items():
            value = str(fsdp.get(name, usual[0])).lower()
            if value not in usual:
                raise WorkloadError(f"{self.source}: fsdp_{name}: {value}: {reason}", key="launch")
        if unknown := set(fsdp) - set(_NOT_PLAIN) - _PLAIN - _LOADING - {SHARDING_STRATEGY}:
            names = ", ".join(f"fsdp_{name}" for name in sorted(unknown))
            raise WorkloadError(f"{self.source}: {names}: not known to loop: pytorch", key="launch")

    def _plain_fsdp(self) -> dict[Path, Any]:
        """Return FSDP's settings for a plain loop, where it casts the weights that it gathers itself."""
        assert self.fsdp is not None
        self._refuse_for_plain_loop(self.fsdp)
        version = int(self.fsdp.get("version", 1))
        found: dict[Path, Any] = {("parallel", "strategy"): f"fsdp{version}"}
        reshard = str(self.fsdp.get("reshard_after_forward", "true")).lower()
        if reshard in ("false", "shard_grad_op"):
            found["parallel", "reshard_after_forward"] = False
        if layers := self.fsdp.get("transformer_layer_cls_to_wrap"):
            found["parallel", "transformer_layer_cls_to_wrap"] = [layers] if isinstance(layers, str) else list(layers)
        if is_true(self.fsdp.get("cpu_offload")):
            found["parallel", "offload_policy"] = "cpu"
        if self.mixed_precision is not None:
            dtype = PRECISIONS[self.mixed_precision]
            found["parallel", "mp_policy"] = {"param_dtype": dtype, "reduce_dtype": dtype}
        return found


def _by_trainer(loop: str) -> bool:
    return loop in LOOPS and LOOPS[loop].by_trainer


def count(text: Any, option: str) -> int:
    """Return a number of processes or machines; refuse words that only the machine that trains can resolve."""
    if not str(text).isdigit() or int(text) < 1:
        raise WorkloadError(
            f"--launch: {option} is {text!r}: give a number, as the machine that trains is not this one", key="launch"
        )
    return int(text)


def is_true(value: Any) -> bool:
    """Return whether a launcher takes a value for true."""
    return str(value).lower() in ("true", "1", "yes")


SWITCHES = frozenset(
    "--autotuning-tune --elastic-training --force-multi --module --no-python --no-local-rank --no-ssh --no-ssh-check "
    "--save-pid --bind-cores-to-rank -h --help -v --version".split()
)
"""Switches of the command ``deepspeed`` (deepspeed/launcher/runner.py), with hyphens."""
OPTIONS = frozenset(
    "gradient_accumulation_steps gradient_clipping offload_optimizer_device offload_param_device "
    "offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag zero3_save_16bit_model zero_stage "
    "deepspeed_config_file deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter "
    "deepspeed_multinode_launcher deepspeed_moe_layer_cls_names".split()
)
"""Keys of accelerate's ``deepspeed_config``, which are also options of ``accelerate launch`` (1.15)."""


def of_accelerate(section: Mapping[str, Any], precision: str | None, source: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration as accelerate makes it from its own (``DeepSpeedPlugin``).

    Raises:
        WorkloadError: A key is unknown, or the file cannot be read.
    """
    unknown = sorted(map(str, set(section) - OPTIONS))
    if unknown:
        raise WorkloadError(f"{source}: deepspeed_config: unknown key {unknown[0]}", key="launch")
    file = section.get("deepspeed_config_file")
    if file not in (None, "none"):
        return read_file(str(file), source)
    zero: dict[str, Any] = {"stage": int(section.get("zero_stage", 2))}
    for part in ("optimizer", "param"):
        device = str(section.get(f"offload_{part}_device") or "none").lower()
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
            if folder := section.get(f"offload_{part}_nvme_path"):
                zero[f"offload_{part}"]["nvme_path"] = folder
    config = {
        "zero_optimization": zero,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": section.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": section.get("gradient_clipping", "auto"),
    }
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "auto_cast": True}
    elif precision == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def read_file(name: str, source: str) -> dict[str, Any]:
    """Read DeepSpeed's configuration, from the current folder or from that of the launcher's file.

    Raises:
        WorkloadError: It cannot be read.
    """
    beside = FilePath(source).parent / name
    file = name if FilePath(name).is_file() or not beside.is_file() else str(beside)
    try:
        config = read_deepspeed(file)
    except PydanticCustomError as error:
        raise WorkloadError(f"{source}: DeepSpeed's configuration: {error}", key="launch") from error
    if not isinstance(config, dict):
        raise WorkloadError(f"{source}: {file} is no mapping of DeepSpeed's settings", key="launch")
    return config


def in_arguments(words: Sequence[str], source: str) -> dict[str, Any] | None:
    """Return the configuration that a script's arguments name (``--deepspeed FILE``), None if they name none."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--deepspeed", "--deepspeed_config", "--deepspeed-config"):
            file = value if equals else next(iter(words[index + 1 : index + 2]), "")
            if file and not file.startswith("-"):
                return read_file(file, source)
    return None


def gpus_in(include: str) -> list[int]:
    """Return the number of GPUs that a filter names on each machine: ``host1:0,1@host2:0`` gives 2 and 1."""
    return [len(part.partition(":")[2].split(",")) if ":" in part else 0 for part in include.split("@") if part]


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
        deepspeed = of_accelerate(content.get("deepspeed_config") or {}, precision_name, source)
    if kind != "FSDP" and sizes.get("dp_shard_size"):
        raise _contradiction(source, f"dp_shard_size is {sizes['dp_shard_size']}, but distributed_type is {kind}")
    return Launch(source, processes // nodes, nodes, precision_name, fsdp, deepspeed, sizes, _compiles(content))


_KEYS = frozenset(
    "compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_backend dynamo_config "
    "enable_cpu_affinity fp8_config fsdp_config gpu_ids machine_rank main_process_ip main_process_port "
    "main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes "
    "parallelism_config rdzv_backend same_network use_cpu".split()
)
"""Keys of a configuration (accelerate 1.15, ``ClusterConfig``); ``dynamo_backend`` belongs to old ones."""
_COMPILED: Mapping[str, tuple[str, ...]] = {
    "dynamo_backend": ("NO", "INDUCTOR"),
    "dynamo_mode": ("DEFAULT", "MAX-AUTOTUNE-NO-CUDAGRAPHS"),
    "dynamo_use_fullgraph": ("FALSE", "TRUE"),
    "dynamo_use_dynamic": ("FALSE",),
    "dynamo_use_regional_compilation": ("FALSE", "TRUE"),
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


def _compiles(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a workload for accelerate's compiler, where it compiles the model."""
    given = _compiler(content)
    if given["dynamo_backend"] == "NO":
        return {}
    found: dict[str, Any] = {"torch_compile": True}
    if given["dynamo_mode"] != "DEFAULT":
        found["torch_compile_mode"] = given["dynamo_mode"].lower()
    if given["dynamo_use_regional_compilation"] == "TRUE":
        found["dynamo_use_regional_compilation"] = True
    return found


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
