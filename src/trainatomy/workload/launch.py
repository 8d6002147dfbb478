"""What a launcher says about a training: accelerate's configuration, or a command of torchrun, accelerate or deepspeed.

Only what changes memory or time is read, into the keys of a workload: the number of GPUs and machines, mixed
precision, FSDP, DeepSpeed and the degrees of parallelism.  Of the script's own arguments, only ``--deepspeed`` is.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.workload import launch_deepspeed
from trainatomy.workload.document import parse
from trainatomy.workload.nearest import suggestion
from trainatomy.workload.section import Path

_MULTI_GPU = frozenset({"MULTI_GPU", "FSDP", "DEEPSPEED"})
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
_PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
_ACCELERATE_TO_TRAINER = {"offload_params": "cpu_offload", "backward_prefetch_policy": "backward_prefetch"}
"""Keys of accelerate's ``fsdp_config``, without ``fsdp_``, that ``TrainingArguments`` calls otherwise."""
_SHARDING = {"1": "full_shard", "2": "shard_grad_op", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
"""Sharding strategies by their numbers in older accelerate configurations."""

_BY_TRAINER = "is simulated with loop: trainer only"
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
    """What was read from a launcher.

    Attributes:
        source: File or command, for messages.
        gpus: GPUs of each machine.
        nodes: Machines.
        mixed_precision: ``fp16``, ``bf16`` or None.
        fsdp: Settings of FSDP with the keys of ``TrainingArguments.fsdp_config``; None without FSDP.
        deepspeed: DeepSpeed's configuration; None without DeepSpeed.
        sizes: Degrees of parallelism, by their keys in the section ``parallel``.
        compiles: Whether accelerate compiles the model (``dynamo_backend: INDUCTOR``).
    """

    source: str
    gpus: int
    nodes: int = 1
    mixed_precision: str | None = None
    fsdp: Mapping[str, Any] | None = None
    deepspeed: Mapping[str, Any] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    compiles: bool = False

    def settings(self, loop: str) -> dict[Path, Any]:
        """Return the keys of a workload that say the same, for one of its loops."""
        found: dict[Path, Any] = {("parallel", "gpus"): self.gpus}
        if self.nodes > 1:
            found["parallel", "nodes"] = self.nodes
        found |= {("parallel", name): size for name, size in self.sizes.items()}
        if self.compiles:
            found["train", "torch_compile"] = True
        if self.deepspeed is not None:
            if loop != "trainer":
                raise WorkloadError(f"{self.source}: DeepSpeed {_BY_TRAINER}", key="launch")
            return found | self._precision() | {("train", "deepspeed"): dict(self.deepspeed)}
        if self.fsdp is None:
            return found | self._precision()
        if loop == "trainer":
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
        if unknown := set(fsdp) - set(_NOT_PLAIN) - _PLAIN - _LOADING:
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
        if _is_true(self.fsdp.get("cpu_offload")):
            found["parallel", "offload_policy"] = "cpu"
        if self.mixed_precision is not None:
            dtype = _PRECISIONS[self.mixed_precision]
            found["parallel", "mp_policy"] = {"param_dtype": dtype, "reduce_dtype": dtype}
        return found


def read_launch(text: str) -> Launch:
    """Read an accelerate configuration file, a file with a launch command, or a launch command.

    Raises:
        WorkloadError: It cannot be read, it contradicts itself, or it launches what is not simulated.
    """
    path = FilePath(text)
    command = None if path.is_file() else _command_in(text)
    if command is not None:
        return _of_command(command)
    if path.suffix in (".yaml", ".yml", ".json") or (path.is_file() and not _command_in(_text(path))):
        return _of_configuration(parse(_text(path), str(path)).value, str(path))
    command = _command_in(_text(path)) if path.is_file() else None
    if command is None:
        raise WorkloadError(
            f"--launch: {text!r} is neither a file nor a command of torchrun, deepspeed or accelerate launch",
            key="launch",
        )
    return _of_command(command)


def _text(path: FilePath) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"--launch: cannot read {path}: {error}", key="launch") from error


def _command_in(text: str) -> list[str] | None:
    """Return the words of the first launch command in a text, from the launcher on; None if there is none."""
    joined = re.sub(r"\\\s*\n", " ", text)
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for index, word in enumerate(words):
            if FilePath(word).name == "torchrun" or word == "torch.distributed.run":
                return ["torchrun", *words[index + 1 :]]
            if FilePath(word).name == "deepspeed" and not words[:index]:
                return ["deepspeed", *words[index + 1 :]]
            if FilePath(word).name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
                return ["accelerate", *words[index + 2 :]]
    return None


# -- commands ----------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Parser of a launcher's own options; hyphens and underscores are the same."""

    def error(self, message: str) -> Any:
        raise WorkloadError(f"--launch: {message}", key="launch")


def _of_command(words: Sequence[str]) -> Launch:
    launcher, rest = words[0], [_with_hyphens(word) for word in words[1:]]
    return {"torchrun": _of_torchrun, "deepspeed": _of_deepspeed, "accelerate": _of_accelerate}[launcher](rest)


def _with_hyphens(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _of_torchrun(words: Sequence[str]) -> Launch:
    parser = _Parser("torchrun", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc-per-node", default="1")
    parser.add_argument("--nnodes", default="1")
    own = _before_script(words, _TORCHRUN_SWITCHES)
    known, _ = parser.parse_known_args(own)
    nodes = str(known.nnodes).partition(":")[2] or str(known.nnodes)  # MIN:MAX
    deepspeed = launch_deepspeed.in_arguments(words[len(own) :], "torchrun")
    gpus = _count(known.nproc_per_node, "--nproc-per-node")
    return Launch("torchrun", gpus, _count(nodes, "--nnodes"), deepspeed=deepspeed)


def _of_deepspeed(words: Sequence[str]) -> Launch:
    """Read the command ``deepspeed``; a script that it starts names its configuration itself."""
    parser = _Parser("deepspeed", add_help=False, allow_abbrev=False)
    for option in ("--num-gpus", "--num-nodes", "--include", "-i"):
        parser.add_argument(option)
    own = _before_script(words, launch_deepspeed.SWITCHES)
    known, _ = parser.parse_known_args(own)
    included = launch_deepspeed.gpus_in(known.include or known.i or "")
    if len(set(included)) > 1:
        raise WorkloadError("--launch: deepspeed --include: machines with different numbers of GPUs", key="launch")
    gpus = _count(known.num_gpus or next(iter(included), "all"), "deepspeed --num_gpus")
    nodes = _count(known.num_nodes or max(len(included), 1), "--num_nodes")
    deepspeed = launch_deepspeed.in_arguments(words[len(own) :], "deepspeed")
    return Launch("deepspeed", gpus, nodes, deepspeed=deepspeed)


_TORCHRUN_SWITCHES = frozenset({"--standalone", "--no-python", "--run-path", "--virtual-local-rank", "-m", "--module"})
_DISTRIBUTED_TYPES = {
    "use_fsdp": "FSDP",
    "use_deepspeed": "DEEPSPEED",
    "use_megatron_lm": "MEGATRON_LM",
    "tpu": "XLA",
    "multi_gpu": "MULTI_GPU",
}
"""Switches of ``accelerate launch``, and what a configuration file says instead."""
_ACCELERATE_SWITCHES = frozenset(
    {f"--{name.replace('_', '-')}" for name in _DISTRIBUTED_TYPES}
    | {"--cpu", "--debug", "-m", "--module", "--no-python", "-q", "--quiet", "--same-network", "--enable-cpu-affinity"}
    | {"--dynamo-use-fullgraph", "--dynamo-use-dynamic", "--dynamo-use-regional-compilation", "--downcast-bf16"}
    | {"--use-parallelism-config", "--fp8-use-autocast-during-eval"}
)


def _before_script(words: Sequence[str], switches: frozenset[str]) -> list[str]:
    """Return a launcher's own words: everything before the script, whose arguments may have the same names."""
    own: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if not word.startswith("-"):
            break
        own.append(word)
        if "=" not in word and word not in switches:
            own += [value for value in [next(waiting, None)] if value is not None]
    return own


def _count(text: Any, option: str) -> int:
    if not str(text).isdigit() or int(text) < 1:
        raise WorkloadError(
            f"--launch: {option} is {text!r}: give a number, as the machine that trains is not this one", key="launch"
        )
    return int(text)


def _of_accelerate(words: Sequence[str]) -> Launch:
    """Read ``accelerate launch``: its options are the keys of a configuration file, which they override."""
    own = _before_script(words, _ACCELERATE_SWITCHES)
    options: dict[str, Any] = {}
    index = 0
    while index < len(own):
        name, equals, value = own[index].partition("=")
        index += 1
        if not equals and name not in _ACCELERATE_SWITCHES:
            value = own[index] if index < len(own) else ""
            index += 1
        options[name.removeprefix("--").replace("-", "_")] = value if equals or value else True
    file = options.pop("config_file", None)
    content = dict(parse(_text(FilePath(file)), file).value) if file else {}
    deepspeed = {name: options[name] for name in options if name in launch_deepspeed.OPTIONS}
    if deepspeed:
        content["deepspeed_config"] = {**(content.get("deepspeed_config") or {}), **deepspeed}
    for section in ("fsdp", "parallelism_config", "dynamo"):
        given = {name: value for name, value in options.items() if name.startswith(f"{section}_")}
        if given:
            key = section if section.endswith("_config") else f"{section}_config"
            content[key] = {**(content.get(key) or {}), **given}
            options["use_fsdp"] = options.get("use_fsdp") or section == "fsdp"
    named = [kind for switch, kind in _DISTRIBUTED_TYPES.items() if options.get(switch)]
    if named and (named[0] != "MULTI_GPU" or "distributed_type" not in content):
        content["distributed_type"] = named[0]
    names = ("num_processes", "num_machines", "mixed_precision", "gpu_ids")
    content |= {name: options[name] for name in names if name in options}
    content["use_cpu"] = options.get("cpu") or content.get("use_cpu")
    if file is None and str(content.get("num_processes", 1)) != "1":
        content.setdefault("distributed_type", "MULTI_GPU")  # as accelerate does on a machine with several GPUs
    return _of_configuration(content, "accelerate launch")


# -- accelerate's configuration ----------------------------------------------------------------------------------------


def _of_configuration(content: Any, source: str) -> Launch:
    if not isinstance(content, Mapping):
        raise WorkloadError(f"{source}: an accelerate configuration is a mapping of keys to values", key="launch")
    _refuse(content, source)
    kind = str(content.get("distributed_type", "NO")).upper()
    processes = _count(content.get("num_processes", 1), "num_processes")
    nodes = _count(content.get("num_machines", 1), "num_machines")
    if processes % nodes:
        raise _contradiction(source, f"num_processes {processes} is no multiple of num_machines {nodes}")
    if kind == "NO" and processes > 1:
        raise _contradiction(source, f"distributed_type is NO, but num_processes is {processes}")
    gpu_ids = content.get("gpu_ids")
    if isinstance(gpu_ids, str) and gpu_ids != "all" and len(gpu_ids.split(",")) < processes // nodes:
        raise _contradiction(source, f"gpu_ids names {gpu_ids}, fewer GPUs than num_processes {processes}")
    precision = str(content.get("mixed_precision", "no")).lower()
    sizes = {
        name: _count(value, key)
        for key, value in _parallelism(content).items()
        if (name := key.removeprefix("parallelism_config_")) in _SIZES and str(value) != "1"
    }
    fsdp = _fsdp(content.get("fsdp_config") or {}) if kind == "FSDP" else None
    precision_name = precision if precision in _PRECISIONS else None
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
    if _is_true(content.get("use_cpu")):
        raise WorkloadError(f"{source}: use_cpu: a prediction is of GPU memory", key="launch")
    precision = str(content.get("mixed_precision", "no")).lower()
    if precision not in (*_PRECISIONS, "no", "none"):
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
    policy = found.get("auto_wrap_policy")
    if isinstance(found.get("transformer_layer_cls_to_wrap"), str):
        found["transformer_layer_cls_to_wrap"] = found["transformer_layer_cls_to_wrap"].split(",")
    if policy is not None and str(policy).upper() == "SIZE_BASED_WRAP":
        found["min_num_params"] = int(found.get("min_num_params", 0))
    return found


def _contradiction(source: str, message: str) -> WorkloadError:
    return WorkloadError(f"{source}: {message}", key="launch")


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")
