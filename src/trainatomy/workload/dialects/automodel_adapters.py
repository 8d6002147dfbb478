"""NeMo Automodel's adapters: which layers have them, and in which dtype.

Sources: ``components/_peft/lora.py`` and ``components/_peft/module_matcher.py`` of ``nemo_automodel``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainatomy.workload.arguments import is_off
from trainatomy.workload.dialects.translation import configuration_of, names_in
from trainatomy.workload.overlay import get_key
from trainatomy.workload.section import spell_dtype

if TYPE_CHECKING:
    from trainatomy.workload.dialects.translation import Translation

_OF_PEFT = frozenset(
    "dim alpha use_dora dropout dropout_position lora_dtype use_triton target_modules exclude_modules match_all_linear "
    "use_memory_efficient_lora lora_A_init moe_rank_scaling".split()
)
"""The keys of ``PeftConfig``."""


def read_adapters(said: Translation) -> None:
    """Read LoRA: Automodel's own layers, which compute what peft's do."""
    keys = said.section("peft")
    if not keys:
        return
    target = str(keys.pop("_target_", "PeftConfig"))
    if not target.endswith("PeftConfig"):
        said.refuse("peft._target_", f"{target}: not simulated; PeftConfig is")
    said.set("model.lora.r", said.count("peft.dim", 8), "peft.dim")
    said.set("model.lora.lora_alpha", keys.get("alpha", 32), "peft.alpha")
    said.set("model.lora.task_type", "CAUSAL_LM")
    if not is_off(keys.get("use_dora")):
        said.refuse("peft.use_dora", "not simulated: DoRA by Automodel's own layers")
    if dropout := keys.get("dropout", 0.0):
        said.set("model.lora.lora_dropout", dropout, "peft.dropout")
        if keys.get("dropout_position", "post") != "pre":
            said.refuse("peft.dropout", "not simulated: dropout after the adapters; peft.dropout_position: pre is")
    said.set("model.trainable_dtype", _dtype_of_adapters(said, keys.get("lora_dtype")), "peft.lora_dtype")
    _targets(said, keys)
    if not is_off(keys.get("use_triton")):
        said.assume("adapters are computed by PyTorch's kernels, not by Automodel's in Triton (peft.use_triton)")
    if not is_off(keys.get("use_memory_efficient_lora", True)):
        said.assume(
            "adapters keep what Automodel computes again in backward, such as the activations of MLPs, so that memory "
            "is an upper limit (peft.use_memory_efficient_lora)"
        )
    for key in keys.keys() - _OF_PEFT:
        said.reject(f"peft.{key}", "is no key of PeftConfig")


def _dtype_of_adapters(said: Translation, named: Any) -> Any:
    """Return the dtype of adapters, which peft would cast to float32: as named, or that of the layers.

    Layers with quantised weights have the dtype in which they compute.
    """
    if named is not None:
        return spell_dtype(named)
    if said.gives("quantization.load_in_4bit"):
        return spell_dtype(said.value("quantization.bnb_4bit_compute_dtype", "bfloat16"))
    chosen = get_key(said.mapping, ("model", "dtype"))
    if chosen not in (None, "auto"):
        return chosen
    config = configuration_of(get_key(said.mapping, ("model", "id")))
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored is None:
        said.assume("adapters in bfloat16, as the weights are taken to be stored (peft.lora_dtype)")
    return spell_dtype(stored or "bfloat16")


def _targets(said: Translation, keys: Mapping[str, Any]) -> None:
    """Read which layers have adapters (``ModuleMatcher``): by patterns, or all but those that patterns name."""
    wanted = [] if is_off(keys.get("target_modules")) else names_in(keys["target_modules"])
    left_out = [] if is_off(keys.get("exclude_modules")) else names_in(keys["exclude_modules"])
    every = not is_off(keys.get("match_all_linear"))
    for key, patterns in (("peft.target_modules", wanted), ("peft.exclude_modules", left_out)):
        try:
            re.compile(_matching(patterns))
        except re.error as error:
            said.reject(key, f"is no pattern: {error}")
            return
    if wanted == ["*"]:
        said.refuse("peft.target_modules", "'*': not simulated: adapters on the output layer too; '*_proj' is")
    elif wanted or not (left_out or every):
        said.set("model.lora.target_modules", _matching(wanted or ["*_proj"]), "peft.target_modules")
        if not wanted:
            said.assume("adapters on layers whose names end in _proj (peft.target_modules)")
    elif every or not any(re.fullmatch(_matching([pattern]), "lm_head") for pattern in left_out):
        key = "peft.match_all_linear" if every else "peft.exclude_modules"
        said.refuse(key, "not simulated: adapters on the output layer too; add lm_head to peft.exclude_modules")
    else:
        said.set("model.lora.target_modules", "all-linear", "peft.exclude_modules")
        if rest := [pattern for pattern in left_out if pattern != "lm_head"]:
            said.set("model.lora.exclude_modules", _matching(rest), "peft.exclude_modules")


def _matching(patterns: list[str]) -> str:
    """Return the regular expression of the names of layers that patterns match, or that end in one as a part."""
    found = [f"{re.sub(r'(?<![.])[*]', '.*', pattern)}|(.*[.])?{re.escape(pattern)}" for pattern in patterns]
    return "|".join(found)
