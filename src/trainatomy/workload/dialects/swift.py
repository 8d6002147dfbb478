"""ms-swift: options that decide together.

Sources: ``arguments``, ``trainers/mixin.py``, ``trainers/seq2seq_trainer.py``, ``pipelines/train/tuner.py`` and
``template/base.py`` of ``swift``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from trainatomy.workload.arguments import is_off
from trainatomy.workload.dialects.translation import Translation, configuration_of, may_see, names_in, visible_gpus
from trainatomy.workload.overlay import get_key

_RUN = "`trainatomy run swift sft …` executes ms-swift itself without a GPU"
_ATTENTION = {
    "flash_attn": "flash_attention_2",
    **{name: name for name in ("sdpa", "eager", "flash_attention_2", "flex_attention")},
}
_WEIGHTS_OF_1 = frozenset({"default", "last_round", "all", "ignore_empty_think", "ignore_think_prefix"})
"""Parts of ``loss_scale`` that weigh a token with 0 or 1, for which the model computes the loss."""
_RUN_RLHF = "`trainatomy run swift rlhf …` executes ms-swift itself without a GPU"
_LOSSES = {
    "dpo": {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"},
    "kto": {"kto": "kto"},
    "orpo": {"orpo": "orpo"},
    "cpo": {"sigmoid": "cpo", "simpo": "simpo"},
    "simpo": {"simpo": "simpo"},
    "rm": {"reward": "reward"},
}
"""Values of ``loss_type``, the first of which is the default, for each ``rlhf_type``; and those of a workload."""
_REFERENCES = {
    "ref_model": "another model as the reference",
    "ref_adapters": "other adapters as the reference",
    "ld_alpha": "tokens that are weighed by their position",
    "reference_free": "pairs without a reference",
    "f_divergence_type": "another divergence",
    "precompute_ref_log_probs": "a reference that is computed before, which ms-swift refuses",
    "center_rewards_coefficient": "rewards that are centred",
}
_PLAIN_REFERENCES = {"f_divergence_type": "reverse_kl"}
_UNITS = {r"qwen2([._]5)?[-_]vl|qvq": 28, r"qwen3[-_]vl|qwen3[._][5-9]": 32}
"""Pixels per side of a token of Qwen's models, by what is in the names of their types or of the models."""
_TOKENS = {"IMAGE_MIN_TOKEN_NUM": 4, "IMAGE_MAX_TOKEN_NUM": 16384}
"""Variables of the shell with the limits of an image in tokens, and qwen_vl_utils' defaults."""
_PIXELS = {"IMAGE_MIN_TOKEN_NUM": "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM": "MAX_PIXELS"}
"""Variables that say them in pixels, where those in tokens are not set (``compat_qwen_vl_utils``)."""
_TUNERS = {
    "adalora": "AdaLoRA with ranks that are changed between the steps",
    "boft": "BOFT, which looks at values of weights",
    "fourierft": "FourierFT, whose cuFFT has workspaces that are not known",
    "bone": "Bone, which peft 0.20 and newer do not have; MISS by model.peft of a workload is",
    **dict.fromkeys(("longlora", "adapter", "llamapro", "reft"), "modules of ms-swift's own"),
}
"""Why tuners are not simulated."""
_LENGTH = 512
"""Tokens of a sample where nothing says how many."""
_OPTIMIZERS = ("lorap", "multimodal")
"""Optimizers of ms-swift that only group parameters."""
_FULL_BATCH = 16
"""Samples of an optimizer step where ``gradient_accumulation_steps`` is not given."""


def translate(said: Translation) -> None:
    """Read the model and its precision, the tuner, the rows of a batch, checkpointing, evaluation and sharding."""
    kind = _preference(said)
    if kind is not None and kind not in _LOSSES:
        reason = "the trainer of ms-swift for it, which generates what it trains on, or learns from a teacher"
        said.abandon("rlhf_type", f"{kind}: not simulated: {reason}; {_RUN_RLHF}")
        return
    variables = _environment(said)
    _images(said, variables)
    dtype = _model(said)
    _tuner(said)
    _quantisation(said, dtype)
    _rows(said)
    _checkpointing(said, _sharding(said))
    _evaluation(said)
    _loss(said)
    if kind is not None:
        _preferences(said, kind)
    elif not _classifies(said):
        _tokens(said)


def _classifies(said: Translation) -> bool:
    """Read the head of a classification, one class or several of a text, or a number; return whether it is one."""
    task, count, problem = said.take("task_type"), said.take("num_labels"), said.take("problem_type")
    if task is None and count is not None:
        task = "seq_cls"
    if task in (None, "causal_lm"):
        return False
    if task != "seq_cls":
        said.refuse("task_type", f"{task}: not simulated: its loss and its groups of texts; {_RUN}")
        return True
    if "vision_config" in configuration_of(said.value("model")) or not is_off(said.value("padding_free")):
        said.refuse("task_type", f"{task}: not simulated for models that see, and with padding_free; {_RUN}")
    said.set("model.class", "AutoModelForSequenceClassification", "task_type", "num_labels")
    if count is not None:
        said.set("model.config.num_labels", said.count("num_labels", 2), "num_labels")
    if problem is not None:
        said.set("model.config.problem_type", problem, "problem_type")
    if get_key(said.mapping, ("model", "lora")):
        said.set("model.lora.task_type", "SEQ_CLS")
    return True


def _preference(said: Translation) -> str | None:
    """Return the kind of a training on preferences, None for others; the loop's name is that of the command."""
    if get_key(said.mapping, ("loop",)) != "rlhf" and not said.gives("rlhf_type"):
        return None
    return str(said.take("rlhf_type", "dpo"))


def _preferences(said: Translation, kind: str) -> None:
    """Read the loss of preferences, the reference and the head of a reward model."""
    said.set("loop", "preference", "rlhf_type")
    said.set("preference.trainer", "swift", "rlhf_type")
    losses, known = names_in(said.take("loss_type") or []), _LOSSES[kind]
    loss = losses[0] if losses else next(iter(known))
    if len(losses) > 1 or loss not in known:
        said.refuse("loss_type", f"{', '.join(losses)}: not simulated with {kind}: {', '.join(known)} are. {_RUN_RLHF}")
        return
    said.set("preference.loss_type", known[loss], *(("loss_type",) if losses else ()), "rlhf_type")
    said.take("loss_weights")
    alpha = {"dpo": "rpo_alpha", "cpo": "cpo_alpha", "simpo": "cpo_alpha"}.get(kind)
    weights = {"rpo_alpha": said.take("rpo_alpha", 0.0), "cpo_alpha": said.take("cpo_alpha", 1.0)}
    if alpha is not None and not is_off(weights[alpha]):
        said.set("preference.rpo_alpha", weights[alpha], alpha)
    for key, reason in _REFERENCES.items():
        value = said.take(key)
        if not is_off(value) and value != _PLAIN_REFERENCES.get(
            key, said.value("model") if key == "ref_model" else None
        ):
            said.refuse(key, f"{value}: not simulated: {reason}; {_RUN_RLHF}")
    for key in ("packing", "padding_free", "use_liger_kernel"):
        if not is_off(said.value(key)):
            said.refuse(key, f"not simulated with rlhf_type {kind}; {_RUN_RLHF}")
    if kind == "rm":
        said.set("model.class", "AutoModelForSequenceClassification", "rlhf_type")
        said.set("model.config.num_labels", 1)
        if get_key(said.mapping, ("model", "lora")):
            said.set("model.lora.task_type", "SEQ_CLS")
        said.take("task_type"), said.take("num_labels"), said.take("problem_type")
    elif kind in ("dpo", "kto") and said.value("use_logits_to_keep") is not False:
        length = get_key(said.mapping, ("data", "sequence_length")) or _LENGTH
        if isinstance(length, int):
            said.set("data.prompt_length", length // 2)
            said.assume("half of each sample is the prompt, whose logits are left out; give --prompt-length for yours")
    if kind == "kto":
        said.assume("half of the answers of each batch are good, and all have the same length")
    else:
        said.assume("both answers of a pair have the same length")


def _environment(said: Translation) -> Mapping[str, str]:
    """Read GPUs: a process for each of ``NPROC_PER_NODE``; without it, one process spreads the model over all.

    Returns:
        The variables that are set.
    """
    env = said.take("ENV") or {}
    if not isinstance(env, Mapping):
        said.reject("ENV", f"must be a mapping of variables to values, found {env!r}")
        env = {}
    variables = {**{str(name): str(value) for name, value in env.items()}, **said.variables}
    count = variables.get("NPROC_PER_NODE", "")
    if count.isdigit():
        said.set("parallel.gpus", int(count), "ENV")
    visible, placement = visible_gpus(variables), said.take("device_map")
    processes = get_key(said.mapping, ("parallel", "gpus")) or 1
    if visible > processes:
        said.refuse(
            "device_map",
            f"not simulated: {processes} process(es) would spread the layers over {visible} GPUs "
            f"(CUDA_VISIBLE_DEVICES): set NPROC_PER_NODE={visible} for a process on each. {_RUN}",
        )
    elif not is_off(placement) and placement != "auto":
        said.refuse("device_map", f"{placement}: not simulated: a device map; {_RUN}")
    return variables


def _images(said: Translation, variables: Mapping[str, str]) -> None:
    """Read the limits of images: of any model before its processor, of Qwen's those of qwen_vl_utils in its place."""
    most, options = said.take("max_pixels"), said.take("model_kwargs") or {}
    if not may_see(said.value("model")):
        return
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except ValueError:
            said.reject("model_kwargs", f"is no JSON: {options}")
            return
    variables = {**variables, **{str(name).upper(): str(value) for name, value in options.items()}}
    if most is not None and not str(most).startswith("-"):
        said.set("data.image_pixels", [1, said.count("max_pixels", 1)], "max_pixels")
    config = configuration_of(said.value("model"))
    name = str(config.get("model_type") or said.value("model_type") or said.value("model")).lower()
    unit = next((unit for pattern, unit in _UNITS.items() if re.search(pattern, name)), None)
    given = {name: text for name in (*_TOKENS, *_PIXELS.values()) if (text := variables.get(name))}
    if wrong := next((name for name, text in given.items() if not text.isdigit()), None):
        key = "model_kwargs" if options else "ENV"
        said.reject(key, f"{wrong}: is {given[wrong]!r}: write a number")
    elif unit and (given or config):
        limits = []
        for name, default in _TOKENS.items():
            pixels = int(given.get(_PIXELS[name], default * unit**2))
            limits.append(int(given.get(name, pixels // unit**2)) * unit**2)
        said.set("data.image_limits", limits, "ENV")
    if any(name.startswith(("VIDEO_", "FPS")) for name in variables):
        said.assume("samples have images and no videos, whose limits are not read (VIDEO_…, FPS_…)")


def _model(said: Translation) -> str:
    """Read the precision and the attention of the model; return the dtype of its weights."""
    config = configuration_of(said.value("model"))
    given = said.take("torch_dtype")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = str(given or stored)
    if given:
        said.set("model.dtype", given, "torch_dtype")
    elif not config:
        said.assume("weights are stored in bfloat16 (torch_dtype)")
    half = dtype == "bfloat16"
    bf16, fp16 = said.take("bf16", half), said.take("fp16", not half)
    said.set("train.bf16", not is_off(bf16), "bf16", "torch_dtype")
    said.set("train.fp16", not is_off(fp16), "fp16", "torch_dtype")
    attention = said.word("attn_impl")
    if attention in _ATTENTION:
        said.set("model.attn_implementation", _ATTENTION[attention], "attn_impl")
    elif attention is not None:
        said.refuse("attn_impl", f"{attention}: not simulated; {', '.join(_ATTENTION)} are. {_RUN}")
    if "vision_config" in config:
        said.assume("each sample has an image, as the model sees; give --images and --image-size for yours")
    return dtype


def _tuner(said: Translation) -> None:
    """Read what is trained: all weights, or adapters on linear layers, by default without towers that see."""
    kind, loaded = said.take("tuner_type", "lora"), said.take("adapters")
    sees = said.take("freeze_vit", True), said.take("freeze_aligner", True)
    said.set("model.freeze_vision_tower", not is_off(sees[0]), "freeze_vit")
    said.set("model.freeze_multi_modal_projector", not is_off(sees[1]), "freeze_aligner")
    said.set("model.frozen_tower", "without_grad")
    if not is_off(said.take("freeze_llm")):
        said.refuse("freeze_llm", f"not simulated: training of the tower alone; {_RUN}")
    if not is_off(loaded):
        said.refuse("adapters", f"not simulated: an adapter that is loaded; {_RUN}")
    frozen = said.take("freeze_parameters")
    if kind == "full":
        if not is_off(frozen):
            said.set("model.freeze", [f"{prefix}*" for prefix in names_in(frozen)], "freeze_parameters")
    elif kind == "vera":
        _shared_projections(said)
    elif kind != "lora":
        said.refuse("tuner_type", f"{kind}: not simulated: {_TUNERS.get(str(kind), 'a tuner of a plugin')}; {_RUN}")
    _adapters(said, wanted=kind == "lora")


def _shared_projections(said: Translation) -> None:
    """Read VeRA, on layers of one name: of several, ms-swift leaves out those of another size."""
    targets = names_in(said.value("target_modules", "all-linear"))
    if len(targets) != 1 or targets[0].startswith("all-"):
        said.refuse("tuner_type", f"vera: not simulated without target_modules of one name, of equal sizes; {_RUN}")
        return
    given = {"peft_type": "VERA", "target_modules": targets, "r": said.take("vera_rank", 256)}
    given |= {"vera_dropout": said.take("vera_dropout", 0.0), "d_initial": said.take("vera_d_initial", 0.1)}
    if saved := said.value("modules_to_save"):
        given["modules_to_save"] = names_in(saved)
    said.set("model.peft", given, "vera_rank", "target_modules", "tuner_type")


def _adapters(said: Translation, *, wanted: bool) -> None:
    defaults = {"lora_rank": ("r", 8), "lora_alpha": ("lora_alpha", 32), "lora_dropout": ("lora_dropout", 0.05)}
    others = {"lora_bias": "bias", "target_parameters": "target_parameters", "modules_to_save": "modules_to_save"}
    values = {key: said.take(key) for key in (*defaults, *others)}
    targets, pattern = names_in(said.take("target_modules", "all-linear")), said.take("target_regex")
    dtype, start = said.take("lora_dtype"), str(said.take("init_weights", "true")).lower()
    if not wanted:
        said.take("use_dora"), said.take("use_rslora")
        return
    for key, (name, default) in defaults.items():
        said.set(f"model.lora.{name}", default if values[key] is None else values[key], key)
    for key, name in others.items():
        if not is_off(values[key]):
            listed = key != "lora_bias"
            said.set(f"model.lora.{name}", names_in(values[key]) if listed else values[key], key)
    said.set("model.lora.task_type", "CAUSAL_LM")
    named = {"all-embedding", "all-router", "all-norm"}.intersection((*targets, *names_in(values["modules_to_save"])))
    if named:
        key = "target_modules" if named & {*targets} else "modules_to_save"
        said.refuse(key, f"{min(named)}: not simulated: name the layers")
    chosen: Any = pattern or ("all-linear" if "all-linear" in targets else targets)
    said.set("model.lora.target_modules", chosen, "target_regex", "target_modules")
    if dtype is not None:
        said.set("model.trainable_dtype", dtype, "lora_dtype")
    if start not in ("true", "false", "gaussian"):
        said.refuse("init_weights", f"{start}: not simulated: an initialisation that keeps further copies; {_RUN}")
    for key in ("lora_rank", "target_modules"):
        if not said.gives(key) and not pattern:
            said.assume(
                {"lora_rank": "adapters of rank 8", "target_modules": "on all linear layers"}[key] + f" ({key})"
            )


def _quantisation(said: Translation, dtype: str) -> None:
    method, bits = said.take("quant_method"), said.take("quant_bits")
    kind, double = said.take("bnb_4bit_quant_type", "nf4"), said.take("bnb_4bit_use_double_quant", True)
    compute, storage = said.take("bnb_4bit_compute_dtype"), said.take("bnb_4bit_quant_storage")
    if is_off(method):
        if not is_off(bits):
            said.assume("quant_bits has no effect without quant_method")
        return
    config = configuration_of(said.value("model"))
    if method != "bnb" or str(bits) not in ("4", "8"):
        key = "quant_method" if method != "bnb" else "quant_bits"
        said.refuse(key, f"{said.value(key)}: not simulated; bnb with 4 and 8 bits is. {_RUN}")
        return
    if "vision_config" in config:
        said.refuse("quant_method", f"bnb: not simulated for models that see, whose towers stay whole; {_RUN}")
    section: dict[str, Any] = {
        "load_in_4bit" if str(bits) == "4" else "load_in_8bit": True,
        "prepare_model_for_kbit_training": False,
    }
    if str(bits) == "4":
        section |= {
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": not is_off(double),
            "bnb_4bit_compute_dtype": compute or ("bfloat16" if dtype == "bfloat16" else "float32"),
        }
        section |= {"bnb_4bit_quant_storage": storage} if storage is not None else {}
    if any("expert" in key for key in config):
        section["llm_int8_skip_modules"] = ["mlp.gate", "mlp.shared_expert_gate", "lm_head"]
    for name, value in section.items():
        said.set(f"model.quantization.{name}", value, name, "quant_bits")


def _rows(said: Translation) -> None:
    """Read the rows of a batch: samples that are padded, or that are joined into one row (packing, padding_free)."""
    size, length = said.count("per_device_train_batch_size", 1), said.take("max_length")
    packs, joins = not is_off(said.take("packing")), not is_off(said.take("padding_free"))
    long = said.take("packing_length") or length if packs else length
    if not is_off(said.take("group_by_length")):
        said.set("train.train_sampling_strategy", "group_by_length", "group_by_length")
    elif said.take("train_dataloader_shuffle") is not None and is_off(said.value("train_dataloader_shuffle")):
        said.set("train.train_sampling_strategy", "sequential", "train_dataloader_shuffle")
    said.set("train.per_device_train_batch_size", size, "per_device_train_batch_size")
    said.set("data.attention_mask", not (packs or joins))
    if (packs or joins) and not str(said.value("attn_impl")).startswith("flash_att"):
        key = "packing" if packs else "padding_free"
        said.reject(key, "needs attn_impl: flash_attn, as ms-swift says")
    if long is None:
        said.assume("samples of 512 tokens, as max_length is not given: give --sequence-length for yours")
    else:
        key = "packing_length" if packs and said.gives("packing_length") else "max_length"
        said.set("data.sequence_length", long, key)
        what = "packs are full, each of one sample of" if packs else "every sample has"
        said.assume(f"{what} {long} tokens ({key}); give --lengths-file for those of your data")
    if (packs or joins) and size > 1:
        said.assume(f"the one row of a batch with {size} samples is computed as {size} rows")
    ranks = math.prod(get_key(said.mapping, ("parallel", name)) or 1 for name in ("gpus", "nodes"))
    steps = max(1, math.ceil(_FULL_BATCH / size / ranks))
    said.set(
        "train.gradient_accumulation_steps",
        said.count("gradient_accumulation_steps", steps),
        "gradient_accumulation_steps",
    )
    if not said.gives("gradient_accumulation_steps"):
        said.assume(f"{steps} accumulation steps, for {_FULL_BATCH} samples (gradient_accumulation_steps)")


def _sharding(said: Translation) -> str | None:
    """Read DeepSpeed and FSDP, whose configurations have names; return which of them is used."""
    deepspeed = said.take("deepspeed")
    if not is_off(deepspeed):
        config = said.configuration("deepspeed")
        if config is not None:
            said.set("train.deepspeed", config, "deepspeed")
        return "deepspeed"
    fsdp = said.take("fsdp")
    if is_off(fsdp):
        return _launched(said)
    config = said.configuration("fsdp") or {}
    options = {str(key).removeprefix("fsdp_"): value for key, value in (config.get("fsdp_config") or {}).items()}
    if not is_off(options.pop("activation_cpu_offload", None)):
        said.refuse("fsdp", f"not simulated: activations in host memory (activation_cpu_offload); {_RUN}")
    said.set("train.fsdp", str(config.get("fsdp", "full_shard auto_wrap")), "fsdp")
    said.set("train.fsdp_config", {"version": 2, **options}, "fsdp")
    return "checkpointed fsdp" if options.get("activation_checkpointing") else "fsdp"


def _launched(said: Translation) -> str | None:
    """Return what a launcher shards with; None for nothing."""
    if get_key(said.mapping, ("train", "deepspeed")):
        return "deepspeed"
    if not get_key(said.mapping, ("train", "fsdp")):
        return None
    recomputes = get_key(said.mapping, ("train", "fsdp_config", "activation_checkpointing"))
    return "checkpointed fsdp" if recomputes and not is_off(recomputes) else "fsdp"


def _checkpointing(said: Translation, sharded: str | None) -> None:
    """Read checkpointing, which is on; PyTorch's non-reentrant one with DDP only."""
    wanted, options = not is_off(said.take("gradient_checkpointing", True)), said.take("gradient_checkpointing_kwargs")
    towers = said.take("vit_gradient_checkpointing")
    trains_towers = get_key(said.mapping, ("model", "freeze_vision_tower")) is False
    if towers is not None and is_off(towers) == wanted and trains_towers:
        said.refuse(
            "vit_gradient_checkpointing", f"not simulated: checkpointing of the tower alone, or not of it; {_RUN}"
        )
    on = wanted and sharded != "checkpointed fsdp"
    said.set("train.gradient_checkpointing", on, "gradient_checkpointing")
    if not on:
        return
    if isinstance(options, str):
        try:
            options = json.loads(options)
        except ValueError:
            said.reject("gradient_checkpointing_kwargs", f"is no JSON: {options}")
            return
    is_ddp = (get_key(said.mapping, ("parallel", "gpus")) or 1) > 1 and sharded is None
    chosen = options or {"use_reentrant": not is_ddp}
    said.set("train.gradient_checkpointing_kwargs", chosen, "gradient_checkpointing_kwargs")
    if not said.gives("gradient_checkpointing"):
        said.assume("gradient checkpointing is on (gradient_checkpointing)")


def _evaluation(said: Translation) -> None:
    """Read evaluation: as often as checkpoints are written, where there is data for it."""
    keys = ("val_dataset", "cached_val_dataset", "split_dataset_ratio", "eval_dataset")
    data = [key for key in keys if not is_off(said.take(key))]
    strategy, size = said.take("eval_strategy"), said.count("per_device_eval_batch_size", 1)
    strategy = said.value("save_strategy", "steps") if strategy is None else strategy
    if not is_off(said.take("predict_with_generate")) and data:
        said.refuse("predict_with_generate", f"not simulated: evaluation that generates by ms-swift's engine; {_RUN}")
    if data and strategy not in ("no", False):
        said.set("train.eval_strategy", strategy, "eval_strategy", *data)
        said.set("train.per_device_eval_batch_size", size, "per_device_eval_batch_size")


def _loss(said: Translation) -> None:
    """Read how tokens are weighed, and the loss of routers."""
    scale, factor = said.take("loss_scale"), said.take("router_aux_loss_coef")
    if scale is not None and not _WEIGHTS_OF_1.issuperset(str(scale).split("+")):
        said.refuse("loss_scale", f"{scale}: not simulated: a loss that weighs tokens; {_RUN}")
    if not is_off(factor):
        said.set("model.config.output_router_logits", True, "router_aux_loss_coef")
    optimizer = said.take("optimizer")
    if optimizer is not None and optimizer not in _OPTIMIZERS:
        said.refuse("optimizer", f"{optimizer}: not simulated: an optimizer that ms-swift makes itself; {_RUN}")
    said.set("train.include_num_input_tokens_seen", "all")


def _tokens(said: Translation) -> None:
    """Say which tokens are in the loss; the accuracy of each micro-batch is computed on the CPU, which waits for it."""
    said.assume("every token is in the loss, and the CPU waits in each micro-batch for its accuracy")
    if said.take("use_logits_to_keep", True):
        said.assume(
            "of prompts ms-swift computes no logits (use_logits_to_keep): where samples have them, less is allocated, "
            "and more may be reserved, as the sizes of logits vary"
        )
