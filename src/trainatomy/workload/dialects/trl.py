"""TRL's command line: keys that decide together (``trl/scripts/sft.py``, ``trl/trainer/model_config.py``)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from trainatomy.workload.launch import read_launch
from trainatomy.workload.overlay import get_key
from trainatomy.workload.trl import MAX_LENGTH, trl_settings

if TYPE_CHECKING:
    from trainatomy.workload.dialects.translation import Translation

_ADAPTERS = {
    "lora_r": ("r", 16),
    "lora_alpha": ("lora_alpha", 32),
    "lora_dropout": ("lora_dropout", 0.05),
    "lora_target_modules": ("target_modules", None),
    "lora_target_parameters": ("target_parameters", None),
    "lora_modules_to_save": ("modules_to_save", None),
    "lora_task_type": ("task_type", "CAUSAL_LM"),
    "use_rslora": ("use_rslora", False),
    "use_dora": ("use_dora", False),
}
"""Keys of adapters: that of a workload, and TRL's default."""


def translate(said: Translation) -> None:
    """Read the loop, the model, adapters, quantisation, the launcher, and the settings of TRL's own configuration."""
    if get_key(said.mapping, ("loop",)) is None:
        loop = "grpo" if said.gives("num_generations") or said.gives("max_completion_length") else "sft"
        said.set("loop", loop)
        said.assume(f"the training is `trl {loop}`: for another, write the command (`-- trl dpo --config FILE`)")
    loop = get_key(said.mapping, ("loop",))
    dtype = said.take("dtype", "float32")
    said.set("model.dtype", dtype, "dtype")
    if not said.gives("dtype"):
        said.assume("weights in float32 (dtype)")
    _adapters(said)
    _quantisation(said, dtype)
    if (file := _accelerate_file(said)) is not None:
        for path, value in read_launch(str(file)).settings(loop).items():
            said.set(".".join(map(str, path)), value, "accelerate_config")
    for key in trl_settings().names():
        if said.gives(key):
            said.set(f"trl.{key}", said.take(key), key)
    _lengths(said, loop)


def _accelerate_file(said: Translation) -> FilePath | None:
    """Return accelerate's configuration: a file, or the name of one that TRL ships."""
    package = find_spec("trl")
    shipped = (
        FilePath((package and package.origin) or "").parent
        / "accelerate_configs"
        / f"{said.value('accelerate_config')}.yaml"
    )
    if said.gives("accelerate_config") and shipped.is_file():
        said.take("accelerate_config")
        return shipped
    return said.file("accelerate_config")


def _adapters(said: Translation) -> None:
    wanted = said.take("use_peft", False)
    for key, (name, default) in _ADAPTERS.items():
        value = said.take(key, default)
        if wanted and value is not None:
            said.set(f"model.lora.{name}", value, key)
    if wanted and not said.gives("lora_r"):
        said.assume("adapters of rank 16 (lora_r)")


def _quantisation(said: Translation, dtype: Any) -> None:
    four, eight = said.take("load_in_4bit", False), said.take("load_in_8bit", False)
    kind, double = said.take("bnb_4bit_quant_type", "nf4"), said.take("use_bnb_nested_quant", False)
    storage = said.take("bnb_4bit_quant_storage")
    if four:
        said.set("model.quantization.load_in_4bit", True, "load_in_4bit")
        said.set("model.quantization.bnb_4bit_quant_type", kind, "bnb_4bit_quant_type")
        said.set("model.quantization.bnb_4bit_use_double_quant", double, "use_bnb_nested_quant")
        said.set("model.quantization.bnb_4bit_compute_dtype", "float32" if dtype == "auto" else dtype, "dtype")
        if storage is not None:
            said.set("model.quantization.bnb_4bit_quant_storage", storage, "bnb_4bit_quant_storage")
    elif eight:
        said.set("model.quantization.load_in_8bit", True, "load_in_8bit")


def _lengths(said: Translation, loop: str) -> None:
    """Read how long samples are: as long as they may be; prompts of GRPO have no limit."""
    if loop == "grpo":
        said.assume("prompts of 512 tokens; give --sequence-length for yours")
        return
    limit = said.value("max_length", MAX_LENGTH)
    said.set("data.sequence_length", limit, "max_length")
    said.assume_length(limit, "max_length")
    if loop in ("dpo", "kto") and isinstance(limit, int):
        said.set("data.prompt_length", limit // 2)
        said.assume("half of them are the prompt; give --prompt-length for yours")
