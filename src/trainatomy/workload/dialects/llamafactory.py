"""LLaMA-Factory: keys that decide together.

Sources: ``hparams/parser.py``, ``model/adapter.py`` and ``model/patcher.py`` of ``src/llamafactory``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.workload.arguments import is_off
from trainatomy.workload.deepspeed import zero_stage
from trainatomy.workload.dialects.translation import names_in

if TYPE_CHECKING:
    from trainatomy.workload.dialects.translation import Translation

_ATTENTION = {"sdpa": "sdpa", "disabled": "eager", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
_STAGES = {
    "rm": "the reward trainer of LLaMA-Factory, with a head for values",
    "ppo": "PPO",
    "dpo": "the DPO trainer of LLaMA-Factory, which is not TRL's",
    "kto": "the KTO trainer of LLaMA-Factory, which is not TRL's",
}
_RUN = "`trainatomy run llamafactory-cli train FILE` executes LLaMA-Factory itself without a GPU"
_OF_ADAPTERS = "lora_rank lora_alpha lora_target lora_dropout use_rslora use_dora additional_target".split()
_VERSION_1 = ("train_dataset", "dist_config", "model_class")


def translate(said: Translation) -> None:
    """Read the method, the precision, checkpointing, quantisation, packing and evaluation."""
    for key in _VERSION_1:
        if said.gives(key):
            said.abandon(key, f"is a key of LLaMA-Factory's v1 trainer, whose configurations are not read: {_RUN}")
            return
    stage = said.take("stage", "sft")
    if stage in _STAGES:
        said.refuse("stage", f"{stage}: not simulated: {_STAGES[stage]}; {_RUN}")
    if not said.take("do_train", False) and said.gives("do_train"):
        said.reject("do_train", "false: the file trains nothing")
    _method(said)
    _precision(said)
    _quantisation(said)
    _checkpointing(said)
    _data(said)
    _evaluation(said)
    attention = said.take("flash_attn", "auto")
    if attention in _ATTENTION:
        said.set("model.attn_implementation", _ATTENTION[attention], "flash_attn")
    elif attention != "auto":
        said.reject("flash_attn", f"has no value {attention!r}; known: auto, {', '.join(_ATTENTION)}")


def _method(said: Translation) -> None:
    """Read what is trained: all weights, adapters on all linear layers, or the last layers."""
    method = said.take("finetuning_type", "lora")
    for key, default in (("freeze_vision_tower", True), ("freeze_multi_modal_projector", True)):
        said.set(f"model.{key}", said.take(key, default), key)
    if method == "lora":
        _adapters(said)
    else:
        for key in _OF_ADAPTERS:
            said.take(key)
    if method in ("freeze", "oft"):
        reason = "training of some layers" if method == "freeze" else "OFT's adapters"
        said.refuse("finetuning_type", f"{method}: not simulated: {reason}; {_RUN}")
    for key in ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"):
        said.take(key)
    if said.gives("adapter_name_or_path") and not is_off(said.take("adapter_name_or_path")):
        said.refuse("adapter_name_or_path", f"not simulated: an adapter that is loaded; {_RUN}")
    said.take("create_new_adapter")


def _adapters(said: Translation) -> None:
    rank = said.count("lora_rank", 8)
    said.set("model.lora.r", rank, "lora_rank")
    said.set("model.lora.lora_alpha", said.take("lora_alpha", 2 * rank), "lora_alpha")
    said.set("model.lora.task_type", "CAUSAL_LM")
    unused = said.take("ddp_find_unused_parameters", False)
    said.set("train.ddp_find_unused_parameters", unused, "ddp_find_unused_parameters")
    names = names_in(said.take("lora_target", "all"))
    said.set("model.lora.target_modules", "all-linear" if names == ["all"] else names, "lora_target")
    if saved := said.take("additional_target"):
        said.set("model.lora.modules_to_save", names_in(saved), "additional_target")
    if not said.gives("lora_rank"):
        said.assume("adapters of rank 8 (lora_rank)")
    if not said.gives("lora_target"):
        said.assume("adapters on all linear layers (lora_target)")


def _precision(said: Translation) -> None:
    """Read the dtype of weights: as stored; trained ones are cast to float32, except with pure_bf16 or ZeRO-3."""
    deepspeed = said.configuration("deepspeed")
    if deepspeed is not None:
        said.set("train.deepspeed", deepspeed, "deepspeed")
    if not said.take("pure_bf16", False) and (zero_stage(deepspeed) != 3 or said.gives("quantization_bit")):
        said.set("model.trainable_dtype", "float32")
        said.assume("trained weights are cast to float32 (pure_bf16)")


def _quantisation(said: Translation) -> None:
    bits, method = said.take("quantization_bit"), said.take("quantization_method", "bnb")
    kind, double = said.take("quantization_type", "nf4"), said.take("double_quantization", True)
    if is_off(bits):
        return
    if str(method).lower() not in ("bnb", "bitsandbytes"):
        said.refuse("quantization_method", f"{method}: not simulated; bnb is")
        return
    dtype = _compute_dtype(said)
    said.set("model.quantization.prepare_model_for_kbit_training", False)
    if str(bits) == "4":
        said.set("model.quantization.load_in_4bit", True, "quantization_bit")
        said.set("model.quantization.bnb_4bit_quant_type", kind, "quantization_type")
        said.set("model.quantization.bnb_4bit_use_double_quant", double, "double_quantization")
        said.set("model.quantization.bnb_4bit_compute_dtype", dtype, "bf16", "fp16")
        said.set("model.quantization.bnb_4bit_quant_storage", dtype, "bf16", "fp16")
    elif str(bits) == "8":
        said.set("model.quantization.load_in_8bit", True, "quantization_bit")
    else:
        said.reject("quantization_bit", f"{bits}: bitsandbytes has 4 and 8 bits")


def _compute_dtype(said: Translation) -> str:
    if said.value("pure_bf16") or said.value("bf16"):
        return "bfloat16"
    return "float16" if said.value("fp16") else "float32"


def _checkpointing(said: Translation) -> None:
    is_off_here = bool(said.take("disable_gradient_checkpointing", False))
    reentrant = said.take("use_reentrant_gc", True)
    if said.take("gradient_checkpointing") and is_off_here:
        said.refuse("gradient_checkpointing", "contradicts disable_gradient_checkpointing")
    said.set(
        "train.gradient_checkpointing", not is_off_here, "disable_gradient_checkpointing", "gradient_checkpointing"
    )
    if is_off_here:
        return
    said.set("train.gradient_checkpointing_kwargs", {"use_reentrant": bool(reentrant)}, "use_reentrant_gc")
    if not said.gives("disable_gradient_checkpointing"):
        said.assume("gradient checkpointing is on (disable_gradient_checkpointing)")


def _data(said: Translation) -> None:
    length = said.take("cutoff_len", 2048)
    said.set("data.sequence_length", length, "cutoff_len")
    said.set("data.attention_mask", True)
    said.assume_length(length, "cutoff_len")
    said.take("packing")
    if said.take("neat_packing"):
        said.refuse("neat_packing", f"not simulated: attention masks of packed samples; {_RUN}")


def _evaluation(said: Translation) -> None:
    """Read evaluation: it needs data, which ``val_size`` or ``eval_dataset`` give."""
    said.take("val_size")
    if (workers := said.count("ray_num_workers", 1)) > 1:
        said.set("parallel.gpus", workers, "ray_num_workers")
