"""axolotl: keys that decide together.

Sources: ``loaders/model.py``, ``loaders/adapter.py``, ``core/builders``, ``utils/config``, ``utils/collators`` and
``utils/schemas`` of ``src/axolotl``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trainatomy.workload.arguments import is_off
from trainatomy.workload.dialects.axolotl_sharding import read_sharding, uses_fsdp
from trainatomy.workload.dialects.translation import Translation, configuration_of, names_in
from trainatomy.workload.model import LORA_KERNELS
from trainatomy.workload.overlay import get_key

_RUN = "`trainatomy run axolotl train FILE` executes axolotl itself without a GPU"
_TRAINERS = {
    "kto": "which is that of TRL 1.9; loop: kto of a workload is that of TRL 1.16 and newer",
    "a reward model": "which is that of TRL 1.9; loop: reward of a workload is that of TRL 1.16 and newer",
}
"""What keeps a trainer of axolotl from being a loop (``core/trainers`` of axolotl 0.19, and the TRL that it pins)."""
_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""Kinds of trainings on pairs of answers, and their losses."""
_OF_PAIRS = (
    "dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing", "dpo_use_weighting", "dpo_use_liger_kernel",
    "dpo_padding_free", "precompute_ref_log_probs", "dpo_beta", "orpo_alpha", "simpo_gamma", "cpo_alpha", "rl_beta",
)  # fmt: skip
_OLD_ATTENTION = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
"""Keys of earlier releases, the strongest first, and what ``attn_implementation`` says instead."""
_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention")
_UNCAST = (None, "sdpa", "eager")
"""Attention with which axolotl keeps embeddings and norms in float32 where all weights are trained."""
_EMBEDDINGS = {
    "gpt_neox": ("embed_in", "embed_out"),
    "falcon": ("word_embeddings", "lm_head"),
    "nemotron_h": ("embeddings", "lm_head"),
}
"""Names of embeddings and output layers that are not embed_tokens and lm_head (``get_linear_embedding_layers``)."""
_GATED = frozenset(
    "mixtral qwen2_moe qwen3_moe qwen3_next qwen3_5_moe qwen3_5_moe_text qwen3_vl_moe qwen3_vl_moe_text deepseek_v2 "
    "deepseek_v3 glm4_moe glm4_moe_lite glm4v_moe olmoe ernie4_5_moe hunyuan_v1_moe minimax dots1 mistral4 "
    "nemotron_h".split()
)
"""Types of models whose routers are modules called gate."""
_EMBEDDING = "lora_embedding_kernel"
_WITHOUT = "set lora_mlp_kernel: false to predict the training without them"
_EXPERTS = "quantize_moe_experts"
_PLUGINS = ("liger", "cut_cross_entropy", "swanlab", "lm_eval")
_OPTIMIZERS = {
    **dict.fromkeys(("optimi_adamw", "adopt_adamw", "came_pytorch", "muon", "dion", "sinkgd", "q_galore_adamw8bit")),
    **dict.fromkeys(("flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion", "ao_adamw_fp8")),
    "ao_adamw_4bit": "adamw_torch_4bit",
    "ao_adamw_8bit": "adamw_torch_8bit",
}
"""Optimizers that axolotl makes itself, and the Trainer's name for the same."""
_PLAIN = {
    "lora_alpha": "lora_alpha",
    "lora_fan_in_fan_out": "fan_in_fan_out",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_exclude_modules": "exclude_modules",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_layer_replication": "layer_replication",
    "peft_init_lora_weights": "init_lora_weights",
    "peft_trainable_token_indices": "trainable_token_indices",
    "peft_ensure_weight_tying": "ensure_weight_tying",
}
"""Keys of adapters, and those of a workload."""
_LIGER = {
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_layer_norm": ("layer_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
    "liger_cross_entropy": ("cross_entropy",),
    "liger_fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
}


def translate(said: Translation) -> None:
    """Read the model and its precision, adapters, packing, checkpointing, evaluation, kernels and sharding."""
    for key in ("rl", "reward_model", "process_reward_model", "trainer_cls"):
        if not is_off(said.value(key)) and not (key == "rl" and str(said.value(key)) in _LOSSES):
            kind = said.value(key) if key != "reward_model" else "a reward model"
            reason = _TRAINERS.get(str(kind), "which is none of a workload's loops")
            said.abandon(key, f"{kind}: not simulated: the trainer of axolotl for it, {reason}; {_RUN}")
            return
    if get_key(said.mapping, ("allocator",)) == said.table.always["allocator"]:
        said.assume("the allocator has expandable segments (PYTORCH_ALLOC_CONF)")
    _model(said)
    dtype = _precision(said)
    _adapters(said, dtype)
    _unfrozen(said)
    attention = _attention(said)
    _uncast(said, dtype, attention)
    if is_off(said.value("rl")):
        _rows(said, attention)
    else:
        _pairs(said)
    _checkpointing(said)
    _evaluation(said)
    _optimizer(said)
    _kernels(said)
    _plugins(said)
    read_sharding(said)


def _model(said: Translation) -> None:
    kind, remote = said.take("model_type"), said.take("trust_remote_code")
    if kind and not remote and kind != "AutoModelForCausalLM":
        if str(kind).startswith("Auto"):
            said.refuse("model_type", f"{kind}: not simulated: a head that the configuration does not name; {_RUN}")
        else:
            said.set("model.class", kind, "model_type")
    if said.value("base_model_config") == said.value("base_model"):
        said.take("base_model_config")
    if config := said.take("model_config"):
        said.set("model.config", config, "model_config")
    stored, options = said.take("model_quantization_config"), said.take("model_quantization_config_kwargs") or {}
    if not is_off(stored):
        if isinstance(options, Mapping) and options.get("dequantize"):
            methods = {"Mxfp4Config": "mxfp4", "FineGrainedFP8Config": "fp8"}
            said.set("model.quantization.quant_method", methods.get(stored, stored), "model_quantization_config")
            said.set("model.quantization.dequantize", True, "model_quantization_config_kwargs")
        else:
            said.refuse("model_quantization_config", f"{stored}: not simulated without dequantize: true; {_RUN}")
    architecture = str(configuration_of(said.value("base_model")).get("model_type", ""))
    if architecture.startswith("gemma4"):
        said.refuse("base_model", f"{architecture}: not simulated: axolotl's own attention for this model; {_RUN}")
    if said.take("freeze_mm_modules"):
        said.set("model.freeze_vision_tower", True, "freeze_mm_modules")
        said.set("model.freeze_multi_modal_projector", True, "freeze_mm_modules")
    _images(said)
    if not is_off(said.take("tokens")) or not is_off(said.take("resize_token_embeddings_to_32x")):
        said.assume("the model's vocabulary has room for further tokens (tokens)")
    if not is_off(said.take("use_ray")):
        said.set("parallel.gpus", said.count("ray_num_workers", 1), "ray_num_workers")
    said.take("ray_num_workers")


def _images(said: Translation) -> None:
    """Read the size of images, to which axolotl resizes all: of its own, or else that of the model's encoder."""
    encoder = configuration_of(said.value("base_model")).get("vision_config")
    size = said.take("image_size")
    if encoder and size is None:
        size = encoder.get("image_size")
    if size is not None:
        sides = size if isinstance(size, list | tuple) else [size, size]
        said.set("data.image_size", list(reversed(sides)), "image_size")  # width and height
    if encoder:
        what = "give --images for yours" if size else "give --images and --image-size for yours"
        said.assume(f"each sample has an image, as the model sees; {what}")


def _precision(said: Translation) -> str:
    """Read the dtype of weights and of autocast (``resolve_dtype``), and return the first."""
    bf16, fp16 = said.take("bf16", "auto"), not is_off(said.take("fp16"))
    bfloat16, float16 = not is_off(said.take("bfloat16")), not is_off(said.take("float16"))
    said.take("float32")
    mixed = not is_off(bf16) and not (fp16 and bf16 == "auto")
    if mixed or bfloat16:
        dtype = "bfloat16"
    elif fp16 or float16 or not is_off(said.value("load_in_8bit")):
        dtype = "float16"
    else:
        dtype = "float32"
    said.set("model.dtype", dtype, "bf16", "bfloat16", "fp16", "float16")
    said.set("train.bf16", mixed or bfloat16, "bf16", "bfloat16")
    said.set("train.fp16", fp16 and not mixed, "fp16")
    tf32 = said.take("tf32", "auto")
    said.set("train.tf32", tf32 == "auto" or not is_off(tf32), "tf32")
    if not said.gives("bf16") and mixed:
        said.assume("weights and autocast in bfloat16 (bf16: auto)")
    return dtype


def _adapters(said: Translation, dtype: str) -> None:
    kind = said.take("adapter")
    keys = ("lora_r", "lora_dropout", "lora_target_modules", "lora_target_linear", "bnb_config_kwargs", *_PLAIN)
    given = {key: said.take(key) for key in keys}
    four, eight = not is_off(said.take("load_in_4bit")), not is_off(said.take("load_in_8bit"))
    if not is_off(said.take(_EXPERTS)) and not four:
        said.refuse(_EXPERTS, f"not simulated in 8 bits; {_RUN}")
    cast = said.take("peft_autocast_adapter_dtype", True)
    if is_off(kind):
        if four or eight:
            said.reject("load_in_4bit" if four else "load_in_8bit", "needs an adapter, as axolotl says: set adapter")
        return
    if kind not in ("lora", "qlora"):
        said.refuse("adapter", f"{kind}: not simulated; lora and qlora are. {_RUN}")
        return
    for key in ("lora_r", "lora_alpha"):
        if given[key] is None:
            said.reject("adapter", f"{kind}: {key} is missing, for which axolotl has no default")
        elif key == "lora_r":
            said.set("model.lora.r", given[key], key)
    for key, name in _PLAIN.items():
        if given[key] not in (None, [], {}):
            said.set(f"model.lora.{name}", given[key], key)
    said.set("model.lora.lora_dropout", given["lora_dropout"] or 0.0, "lora_dropout")
    said.set("model.lora.task_type", "CAUSAL_LM")
    targets, every = given["lora_target_modules"], not is_off(given["lora_target_linear"])
    if every:
        said.set("model.lora.target_modules", "all-linear", "lora_target_linear")
    elif not is_off(targets):
        said.set("model.lora.target_modules", targets, "lora_target_modules")
    elif is_off(given["lora_target_parameters"]):
        said.reject("adapter", f"{kind}: names no layers: set lora_target_linear or lora_target_modules")
    if cast is False:
        said.set("model.trainable_dtype", dtype, "peft_autocast_adapter_dtype")
    _quantisation(said, kind, dtype, given["bnb_config_kwargs"] or {})


def _unfrozen(said: Translation) -> None:
    """Read the names of the parameters that are trained (``utils/freeze.py``)."""
    names = said.take("unfrozen_parameters")
    if is_off(names):
        return
    patterns = names if isinstance(names, list) else [names]
    if not is_off(said.value("adapter")):
        said.refuse("unfrozen_parameters", f"not simulated with an adapter: axolotl freezes the adapters, too; {_RUN}")
    elif ranged := next((pattern for pattern in patterns if re.search(r"\[[0-9]*(:[0-9]*)?\]$", str(pattern))), None):
        said.refuse("unfrozen_parameters", f"{ranged}: not simulated: some rows of a parameter; {_RUN}")
    else:
        escaped = [re.sub(r"\.(?!\+)", r"\.", str(pattern)) for pattern in patterns]
        said.set("model.freeze_except", escaped, "unfrozen_parameters")
        embeds = any(part in str(pattern) for pattern in patterns for part in ("lm_head", "embed_tokens"))
        said.set("model.enable_input_require_grads", embeds, "unfrozen_parameters")


def _quantisation(said: Translation, kind: str, dtype: str, options: Mapping[str, Any]) -> None:
    """Read quantised weights; norms and embeddings end in the dtype of the others, whatever peft casts in between."""
    four, eight = not is_off(said.value("load_in_4bit")), not is_off(said.value("load_in_8bit"))
    if kind == "qlora" and not four:
        said.reject("adapter", "qlora: needs load_in_4bit: true, as axolotl says")
    elif kind == "lora" and four:
        said.refuse(
            "load_in_4bit", "quantises with adapter: qlora only; with lora, axolotl casts all weights to float32"
        )
    elif four:
        model = str(configuration_of(said.value("base_model")).get("model_type", ""))
        wide = model in ("jamba", "qwen2_moe", "nemotron_h") and not said.value("deepspeed") and not uses_fsdp(said)
        said.set("model.quantization.load_in_4bit", True, "load_in_4bit")
        chosen = {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "float32" if wide else "bfloat16",
        }
        for name, value in {**chosen, **options}.items():
            said.set(f"model.quantization.{name}", value, *(("bnb_config_kwargs",) if name in options else ()))
        _experts(said, options)
    elif eight:
        said.set("model.quantization.load_in_8bit", True, "load_in_8bit")
    if four or eight:
        said.set("model.quantization.prepare_model_for_kbit_training", False)


def _experts(said: Translation, options: Mapping[str, Any]) -> None:
    """Read experts that are quantised as they are loaded, always as nf4 with double quantisation."""
    if is_off(said.value(_EXPERTS)):
        return
    if not is_off(said.value("lora_target_linear")):
        said.reject(_EXPERTS, "does not go with lora_target_linear, as axolotl says: name lora_target_modules")
    elif other := next((key for key in ("lora_target_parameters", "deepspeed") if not is_off(said.value(key))), None):
        said.refuse(_EXPERTS, f"not simulated with {other}; {_RUN}")
    elif uses_fsdp(said):
        said.refuse(_EXPERTS, f"not simulated with FSDP; {_RUN}")
    elif {"bnb_4bit_quant_type", "bnb_4bit_use_double_quant"}.intersection(options):
        said.refuse(_EXPERTS, f"not simulated with other numbers for linear layers (bnb_config_kwargs); {_RUN}")
    else:
        said.set("model.quantization.bnb_4bit_experts", True, _EXPERTS)


def _attention(said: Translation) -> str | None:
    """Read the attention; None for transformers' choice."""
    old = {key: said.take(key) for key in _OLD_ATTENTION}
    named = said.take("attn_implementation") or next((_OLD_ATTENTION[key] for key in old if not is_off(old[key])), None)
    if named is None:
        return None
    key = next((key for key in ("attn_implementation", *_OLD_ATTENTION) if not is_off(said.value(key))), "")
    if named not in _ATTENTION:
        said.refuse(key, f"{named}: not simulated; {', '.join(_ATTENTION)} are. {_RUN}")
        return None
    said.set("model.attn_implementation", named, key)
    return str(named)


def _uncast(said: Translation, dtype: str, attention: str | None) -> None:
    """Read the weights that axolotl keeps in float32: embeddings, norms and gates, where all are trained.

    It goes by the names of modules (``_convert_embedding_modules_dtype``).
    """
    if dtype == "float32" or uses_fsdp(said):
        return
    key = "attn_implementation" if said.gives("attn_implementation") else "base_model"
    if not is_off(said.value("adapter")) or attention not in _UNCAST or _cuts(said):  # which cast all but gates back
        config = configuration_of(said.value("base_model"))
        kinds = {str(part.get("model_type")) for part in (config, config.get("text_config") or {})}
        if kinds & _GATED and is_off(said.value("deepspeed")):
            said.set("model.float32_parameters", [r".*\.gate\."], "base_model")
            said.assume("routers of experts are kept in float32")
        return
    if not is_off(said.value("deepspeed")):
        said.refuse(key, f"not simulated with deepspeed: embeddings and norms that axolotl keeps in float32; {_RUN}")
        return
    architecture = configuration_of(said.value("base_model")).get("model_type")
    tables = "|".join(_EMBEDDINGS.get(str(architecture), ("embed_tokens", "lm_head")))
    kept = [r".*norm.*\.", r".*\.gate\.", rf".*({tables})[^.]*\.weight"]
    said.set("model.float32_parameters", kept, key)
    said.assume("embeddings, the output layer and norms are kept in float32 (attn_implementation)")


def _rows(said: Translation, attention: str | None) -> None:
    """Read the rows of a batch: packs of ``sequence_len`` tokens, or samples that are padded to a multiple."""
    length, size = said.count("sequence_len", 512), said.count("micro_batch_size", 1)
    packs = not is_off(said.take("sample_packing"))
    padded, multiple = said.take("pad_to_sequence_len"), said.count("pad_to_multiple_of", 64)
    rounds = padded is not False and (not packs or padded is not False)
    row = multiple * math.ceil(length / multiple) if rounds else length
    said.set("data.sequence_length", row, "sequence_len")
    said.set("data.attention_mask", not packs or attention is None)
    if padded and not packs:
        said.set("data.padding", True, "pad_to_sequence_len")
    said.set("train.per_device_train_batch_size", size, "micro_batch_size")
    said.set("train.average_tokens_across_devices", False)
    orders = {"curriculum_sampling": "sequential", "group_by_length": "group_by_length"}
    if order := next((key for key in orders if not packs and not is_off(said.value(key))), None):
        said.set("train.train_sampling_strategy", orders[order], order)
    if packs and attention == "sdpa":
        said.refuse("sample_packing", f"with sdpa: not simulated: packs run PyTorch's varlen_attn; {_RUN}")
    if not said.gives("micro_batch_size"):
        said.assume("batches of 1 sample (micro_batch_size)")
    if not is_off(said.take("include_tkps", True)) or not is_off(said.take("include_tokens_per_second")):
        said.set("train.include_num_input_tokens_seen", "all", "include_tkps", "include_tokens_per_second")
        if not said.gives("include_tkps"):
            said.assume("the CPU waits in each micro-batch to count tokens (include_tkps)")
    where = "sequence_len" if said.gives("sequence_len") else "sequence_len, its default"
    tokens = f"{row:,} tokens ({where}{f', padded to a multiple of {multiple}' if row != length else ''})"
    if packs and attention in _UNCAST:
        said.assume(f"packs are full, of {tokens}")
    elif packs:
        rows = f"; the one row of a batch with {size} packs is computed as {size} rows" if size > 1 else ""
        said.assume(f"packs are full, each of one sample of {tokens}{rows}")
    else:
        said.assume(f"every sample has {tokens}; give --lengths-file for those of your data")


def _pairs(said: Translation) -> None:
    """Read a training on pairs of answers (``HFRLTrainerBuilder``); betas only scale numbers."""
    kind, given = str(said.take("rl")), {key: said.take(key) for key in _OF_PAIRS}
    loss = _LOSSES[kind]
    if kind == "dpo" and not is_off(named := given["dpo_loss_type"]):
        kinds = names_in(named)
        if len(kinds) > 1 or kinds[0] not in ("sigmoid", "hinge", "ipo"):
            said.refuse("dpo_loss_type", f"{', '.join(kinds)}: not simulated; sigmoid, hinge or ipo alone are. {_RUN}")
            return
        loss = kinds[0]
    refused = ("dpo_use_weighting", "precompute_ref_log_probs", "dpo_use_liger_kernel", "dpo_padding_free")
    if (key := next((key for key in refused if kind in ("dpo", "ipo") and not is_off(given[key])), None)) is not None:
        said.refuse(key, f"not simulated: another step of TRL's trainer; {_RUN}")
    for key in ("pad_to_multiple_of", "sample_packing", "deepspeed", "fsdp", "fsdp_config", *LORA_KERNELS):
        if not is_off(said.value(key)):
            said.refuse(key, f"not simulated with rl: {kind}; {_RUN}")
    said.set("loop", "preference", "rl")
    said.set("preference.trainer", "axolotl", "rl")
    said.set("preference.loss_type", loss, "rl", "dpo_loss_type")
    if kind == "simpo":
        alpha = _number(said, "cpo_alpha") if said.gives("cpo_alpha") else 1.0
        said.set("preference.rpo_alpha", alpha, "cpo_alpha")
    is_quantised = not is_off(said.value("load_in_4bit")) or not is_off(said.value("load_in_8bit"))
    if is_quantised and kind in ("dpo", "ipo"):
        said.set("model.trainable_dtype", "bfloat16", "load_in_4bit", "load_in_8bit")
    length = said.count("sequence_len", 512)
    said.set("data.sequence_length", length, "sequence_len")
    said.set("train.per_device_train_batch_size", said.count("micro_batch_size", 1), "micro_batch_size")
    said.set("train.average_tokens_across_devices", False)
    for key in ("pad_to_sequence_len", "include_tkps", "include_tokens_per_second", "sample_packing"):
        said.take(key)
    said.assume(f"both answers of a pair have {length:,} tokens with the prompt (sequence_len)")


def _checkpointing(said: Translation) -> None:
    """Read checkpointing: reentrant unless the file says otherwise (``normalize_config``)."""
    wanted, options = said.take("gradient_checkpointing", False), said.take("gradient_checkpointing_kwargs")
    if str(wanted).startswith("offload"):
        said.refuse("gradient_checkpointing", f"{wanted}: not simulated: activations in host memory; {_RUN}")
        return
    said.set("train.gradient_checkpointing", not is_off(wanted), "gradient_checkpointing")
    if not is_off(wanted):
        said.set(
            "train.gradient_checkpointing_kwargs", options or {"use_reentrant": True}, "gradient_checkpointing_kwargs"
        )


def _evaluation(said: Translation) -> None:
    """Read evaluation, which needs data and an interval, and checkpoints."""
    share, size = _number(said, "val_set_size"), said.take("eval_batch_size")
    epochs = _number(said, "num_epochs") or 1.0
    steps = _number(said, "eval_steps") or _interval(_number(said, "evals_per_epoch"), epochs)
    strategy = said.take("eval_strategy")
    said.take("eval_sample_packing")
    has_data = share > 0 or not is_off(said.value("test_datasets"))
    if has_data and (steps or strategy not in (None, "no", False)):
        said.set(
            "train.eval_strategy", "steps" if steps else strategy, "eval_steps", "evals_per_epoch", "eval_strategy"
        )
        said.set("train.eval_on_start", True, "eval_steps", "evals_per_epoch", "eval_strategy")
        said.set("train.eval_accumulation_steps", said.value("gradient_accumulation_steps", 1))
        said.set("train.per_device_eval_batch_size", size or said.count("micro_batch_size", 1), "eval_batch_size")
        if said.take("eval_sequence_len") not in (None, said.value("sequence_len", 512)):
            said.refuse("eval_sequence_len", "evaluation of samples of another length is not simulated")
    said.take("eval_sequence_len")
    saves = _number(said, "save_steps") or _interval(_number(said, "saves_per_epoch"), epochs)
    if (kept := said.take("save_strategy")) is not None:
        said.set("train.save_strategy", kept, "save_strategy")
    best, multiple = said.take("load_best_model_at_end"), bool(steps and saves) and saves % steps == 0
    if not is_off(best) and has_data and multiple:
        said.set("train.load_best_model_at_end", True, "load_best_model_at_end")


def _optimizer(said: Translation) -> None:
    name, options = said.word("optimizer", "adamw_torch_fused"), said.take("optim_args")
    if name in _OPTIMIZERS and _OPTIMIZERS[name] is None:
        said.refuse("optimizer", f"{name}: not simulated: an optimizer that axolotl makes itself; {_RUN}")
        return
    said.set("train.optim", _OPTIMIZERS.get(name, name), "optimizer")
    if options:
        pairs = (
            ",".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, Mapping) else options
        )
        said.set("train.optim_args", pairs, "optim_args")
    if not is_off(compiles := said.take("torch_compile")):
        said.set("train.torch_compile", True, "torch_compile")
        if compiles == "auto":
            said.assume("the model is compiled (torch_compile: auto)")


def _kernels(said: Translation) -> None:
    """Read axolotl's functions for adapters, which it switches on by itself (``check_auto_enable_lora_kernels``)."""
    given = {key: said.take(key) for key in (*LORA_KERNELS, _EMBEDDING)}
    kind, eight = said.value("adapter"), not is_off(said.value("load_in_8bit"))
    if kind not in ("lora", "qlora"):
        return
    automatic = all(value is None for value in given.values()) and is_off(said.value("trust_remote_code"))
    automatic = automatic and is_off(said.value("rl")) and not (kind == "lora" and eight) and not uses_fsdp(said)
    used = [key for key in given if automatic or not is_off(given[key])]
    chosen = [key for key in LORA_KERNELS if key in used]
    if chosen and not automatic:
        _check_kernels(said, chosen[0], eight=kind == "lora" and eight)
    if chosen and not is_off(said.value("peft_use_dora")):
        said.refuse("peft_use_dora", f"not simulated with axolotl's kernels for adapters: {_WITHOUT}. {_RUN}")
    if _EMBEDDING in used and chosen and "embed_tokens" in str(said.value("lora_target_modules")):
        said.refuse("lora_target_modules", f"embed_tokens: not simulated: axolotl's kernel for it: {_WITHOUT}. {_RUN}")
    if chosen:
        said.set("model.kernels", chosen, *chosen)
    if automatic:
        said.assume("axolotl switches on its kernels for adapters (lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel)")


def _check_kernels(said: Translation, key: str, *, eight: bool) -> None:
    """Reject functions for adapters that axolotl rejects."""
    if eight:
        said.reject(key, "does not go with adapter: lora and load_in_8bit, as axolotl says: set it to false")
    elif not is_off(said.value("trust_remote_code")):
        said.reject(key, "does not go with trust_remote_code, as axolotl says: set it to false")
    elif uses_fsdp(said):
        said.refuse(key, f"not simulated with FSDP: set it to false. {_RUN}")


def _plugin_names(said: Translation) -> dict[str, str]:
    """Return the plugins of a file by the names of their packages."""
    plugins = [] if is_off(said.value("plugins")) else names_in(said.value("plugins"))
    return {plugin.removeprefix("axolotl.integrations.").partition(".")[0]: plugin for plugin in plugins}


def _cuts(said: Translation) -> bool:
    """Return whether the loss is cut cross-entropy, which its plugin switches on."""
    return "cut_cross_entropy" in _plugin_names(said) and not is_off(said.value("cut_cross_entropy", True))


def _plugins(said: Translation) -> None:
    names = _plugin_names(said)
    said.take("plugins")
    if unknown := next((plugin for name, plugin in names.items() if name not in _PLUGINS), None):
        said.refuse("plugins", f"{unknown}: not simulated; {_RUN}")
    if _cuts(said):
        kernels = get_key(said.mapping, ("model", "kernels")) or []
        said.set("model.kernels", [*kernels, "cut_cross_entropy"], "cut_cross_entropy", "plugins")
    said.take("cut_cross_entropy")
    liger = {key: not is_off(said.take(key)) for key in _LIGER}
    if "liger" in names:
        chosen = {name: liger[key] for key, kernels in _LIGER.items() for name in kernels}
        said.set("train.use_liger_kernel", any(chosen.values()), "plugins")
        if any(chosen.values()):
            said.set("train.liger_kernel_config", chosen, *_LIGER)
    elif any(liger.values()):
        said.assume("keys of Liger have no effect without its plugin (plugins)")


def _interval(times: float, epochs: float) -> float:
    """Return the share of a training between so many events in each epoch; 0 for none before its end."""
    share = 1 / (times * epochs) if times > 0 else 1.0
    return share if share < 1 else 0.0


def _number(said: Translation, key: str) -> float:
    """Return the number that a key has, refusing other values; 0 where it is not given."""
    value = said.value(key, 0)
    try:
        number = float(value)
    except (TypeError, ValueError):
        said.reject(key, f"must be a number, found {value!r}")
        return 0.0
    if key != "num_epochs":  # which the table reads as well
        said.take(key)
    return number
