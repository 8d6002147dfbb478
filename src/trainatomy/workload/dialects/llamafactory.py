"""LLaMA-Factory: keys that decide together.

Sources: ``hparams/parser.py``, ``model/adapter.py`` and ``model/patcher.py`` of ``src/llamafactory``.
"""

from __future__ import annotations

from trainatomy.workload.arguments import is_off
from trainatomy.workload.deepspeed import zero_stage
from trainatomy.workload.dialects.translation import Translation, configuration_of, may_see, names_in
from trainatomy.workload.overlay import get_key

_ATTENTION = {"sdpa": "sdpa", "disabled": "eager", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
_STAGES = ("pt", "sft", "dpo", "kto", "rm")
_LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo")
_RUN = "`trainatomy run llamafactory-cli train FILE` executes LLaMA-Factory itself without a GPU"
_OF_ADAPTERS = "lora_rank lora_alpha lora_target lora_dropout use_rslora use_dora additional_target".split()
_OF_ROTATIONS = ("oft_rank", "oft_block_size", "oft_target", "module_dropout")
_MULTIPLE = 8
"""Batches are padded to a multiple of this."""
_ROUTED = "dbrx ernie4_5_moe granitemoe jamba jetmoe llama4 mixtral olmoe phimoe qwen2_moe qwen3_moe".split()
"""Types of models whose routers have a loss (``configure_moe``)."""
_CROPPING = ("intern_vl", "intern_s1")
"""Templates of the models whose images are cut into tiles only where the file says so."""
_WITHOUT_TRAINING = ("export_dir", "infer_backend", "do_predict", "do_eval")
"""Keys of files for exports, chats and evaluations."""
_OTHER_TRAINERS = {
    **dict.fromkeys(("train_dataset", "dist_config", "model_class"), "LLaMA-Factory's v1 trainer"),
    **dict.fromkeys(("tensor_model_parallel_size", "expert_model_parallel_size"), "its trainers of Megatron"),
}
"""Keys of trainers whose configurations are not read."""


def translate(said: Translation) -> None:
    """Read the method, the precision, checkpointing, quantisation, packing and evaluation."""
    for key, trainer in _OTHER_TRAINERS.items():
        if said.gives(key):
            said.abandon(key, f"is a key of {trainer}, whose configurations are not read: {_RUN}")
            return
    trains = said.take("do_train")
    if other := next((key for key in _WITHOUT_TRAINING if trains is None and said.gives(key)), None):
        said.abandon(other, "without do_train: true: the file trains nothing")
        return
    if trains is None:
        said.assume("the file trains (do_train: true, which llamafactory-cli train needs)")
    elif is_off(trains):
        said.reject("do_train", "false: the file trains nothing")
    _preferences(said, _stage(said))
    _method(said)
    _precision(said)
    _experts(said)
    _quantisation(said)
    _checkpointing(said)
    _data(said)
    _images(said)
    if get_key(said.mapping, ("loop",)) and not is_off(said.value("enable_liger_kernel")):
        losses = {"fused_linear_cross_entropy": False, "cross_entropy": True}
        said.set("train.liger_kernel_config", losses, "enable_liger_kernel")
    _evaluation(said)
    attention = said.word("flash_attn", "auto")
    if attention in _ATTENTION:
        said.set("model.attn_implementation", _ATTENTION[attention], "flash_attn")
    elif attention != "auto":
        said.reject("flash_attn", f"has no value {attention!r}; known: auto, {', '.join(_ATTENTION)}")


def _stage(said: Translation) -> str:
    stage = str(said.take("stage", "sft"))
    if stage == "ppo":
        said.refuse("stage", f"ppo: not simulated: PPO; {_RUN}")
    elif stage not in _STAGES:
        said.reject("stage", f"has no value {stage!r}; known: {', '.join(_STAGES)}, ppo")
    return stage


def _preferences(said: Translation, stage: str) -> None:
    """Read the loss of preferences; what else the file says of it only scales numbers."""
    given = {key: said.take(key) for key in ("pref_loss", "pref_ftx", "pref_bco_weight", "ld_alpha", "ref_model")}
    if stage not in ("dpo", "kto", "rm"):
        return
    said.set("loop", "preference", "stage")
    said.set("preference.trainer", "llamafactory", "stage")
    loss = {"kto": "kto", "rm": "reward"}.get(stage) or given["pref_loss"] or "sigmoid"
    if stage == "dpo" and loss not in _LOSSES:
        said.reject("pref_loss", f"has no value {loss!r}; known: {', '.join(_LOSSES)}")
        return
    said.set("preference.loss_type", loss, *(("pref_loss",) if stage == "dpo" else ()), "stage")
    if stage != "rm" and not is_off(given["pref_ftx"]):
        said.set("preference.rpo_alpha", given["pref_ftx"], "pref_ftx")
    if loss in _LOSSES and not is_off(given["pref_bco_weight"]) and loss not in ("orpo", "simpo"):
        said.refuse("pref_bco_weight", f"not simulated: the loss of BCO beside another; {_RUN}")
    if stage == "dpo" and given["ld_alpha"] is not None:
        said.refuse("ld_alpha", f"not simulated: tokens that are weighed by their position; {_RUN}")
    if stage != "rm" and given["ref_model"] is not None and loss not in ("orpo", "simpo"):
        said.refuse("ref_model", f"not simulated: another model as the reference; {_RUN}")
    if stage == "kto":
        said.assume("half of the answers of each batch are good, and all have the same length")
    else:
        said.assume("both answers of a pair have the same length")


def _method(said: Translation) -> None:
    """Read what is trained: all weights, adapters on all linear layers, or the last layers."""
    method = said.take("finetuning_type", "lora")
    for key, default in (("freeze_vision_tower", True), ("freeze_multi_modal_projector", True)):
        said.set(f"model.{key}", said.take(key, default), key)
    adapts = method in ("lora", "oft")  # peft lets gradients reach the inputs of a tower, too
    said.set("model.frozen_tower", "kept" if adapts else "without_grad")
    if method == "lora":
        _adapters(said)
    else:
        for key in _OF_ADAPTERS:
            said.take(key)
    if method == "oft":
        _rotations(said)
    else:
        for key in _OF_ROTATIONS:
            said.take(key)
    if method == "freeze":
        said.refuse("finetuning_type", f"freeze: not simulated: training of some layers; {_RUN}")
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


def _rotations(said: Translation) -> None:
    """Read OFT's adapters."""
    if said.gives("quantization_bit"):
        said.refuse("finetuning_type", f"oft: not simulated with quantised weights; {_RUN}")
    said.take("oft_target")  # which LLaMA-Factory does not read: it adapts the layers of lora_target
    names = names_in(said.value("lora_target", "all"))
    targets: str | list[str] = "all-linear" if names == ["all"] else names
    given = {"peft_type": "OFT", "r": said.take("oft_rank", 0), "oft_block_size": said.take("oft_block_size", 32)}
    given |= {"target_modules": targets, "module_dropout": said.take("module_dropout", 0.0), "task_type": "CAUSAL_LM"}
    if saved := said.value("additional_target"):
        given["modules_to_save"] = names_in(saved)
    said.set("model.peft", given, "oft_block_size", "lora_target", "finetuning_type")


def _precision(said: Translation) -> None:
    """Read the dtype of weights: as stored; trained ones are cast to float32, except with pure_bf16 or ZeRO-3."""
    deepspeed = said.configuration("deepspeed")
    if deepspeed is not None:
        said.set("train.deepspeed", deepspeed, "deepspeed")
    if not said.take("pure_bf16", False) and (zero_stage(deepspeed) != 3 or said.gives("quantization_bit")):
        said.set("model.trainable_dtype", "float32")
        said.assume("trained weights are cast to float32 (pure_bf16)")


def _experts(said: Translation) -> None:
    """Read the loss of routers, for which LLaMA-Factory lets models of some types return their logits."""
    if is_off(said.take("moe_aux_loss_coef")):
        return
    config = configuration_of(said.value("model_name_or_path"))
    if config.get("model_type") in _ROUTED:
        said.set("model.config.output_router_logits", True, "moe_aux_loss_coef")
    elif not config or "vision_config" in config:
        reason = "models whose configuration is not here, or that see"
        said.refuse("moe_aux_loss_coef", f"not simulated: the loss of routers of {reason}; {_RUN}")


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
    if said.value("stage", "sft") != "pt":
        said.set("data.pad_to_multiple_of", _MULTIPLE)
    said.assume_length(length, "cutoff_len")
    said.take("packing")
    if not is_off(said.take("disable_shuffling")):
        said.set("train.train_sampling_strategy", "sequential", "disable_shuffling")
    if said.take("neat_packing"):
        said.refuse("neat_packing", f"not simulated: attention masks of packed samples; {_RUN}")


def _images(said: Translation) -> None:
    """Read what becomes of images before the model's processor gets them, and into how many tiles it cuts them."""
    fewest, most = said.count("image_min_pixels", 32**2), said.count("image_max_pixels", 768**2)
    crops = not is_off(said.take("crop_to_patches"))
    if fewest > most:
        said.reject("image_max_pixels", f"is {most}, below image_min_pixels of {fewest}")
    elif may_see(said.value("model_name_or_path")):
        said.set("data.image_pixels", [fewest, most], "image_max_pixels", "image_min_pixels")
        said.assume(f"where samples have images, they are scaled to at most {most:,} pixels (image_max_pixels)")
        if said.value("stage", "sft") == "sft":
            said.set("data.float_dtype", _compute_dtype(said))
        if said.value("template") in _CROPPING:
            said.set("data.image_limits", [1, 12 if crops else 1], "crop_to_patches", "template")


def _evaluation(said: Translation) -> None:
    """Read evaluation: it needs data, which ``val_size`` or ``eval_dataset`` give."""
    said.take("val_size")
    if (workers := said.count("ray_num_workers", 1)) > 1:
        said.set("parallel.gpus", workers, "ray_num_workers")
