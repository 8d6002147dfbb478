"""Settings of DeepSpeed that launchers make: accelerate's ``deepspeed_config``, and the command ``deepspeed``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic_core import PydanticCustomError

from trainatomy.errors import WorkloadError
from trainatomy.workload.deepspeed import read_deepspeed

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
