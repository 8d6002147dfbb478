"""Settings that a launcher decides, and the keys of a workload that say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.section import Path
from trainatomy.workload.spreading import SHARDING_STRATEGY

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
