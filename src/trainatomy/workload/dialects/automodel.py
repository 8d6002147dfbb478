"""NeMo Automodel: keys that decide together.

Sources: ``recipes/llm/train_ft.py``, ``recipes/_dist_utils.py``, ``_transformers/auto_model.py``,
``_transformers/model_init.py``, ``components/distributed``, ``components/loss`` and
``components/optim`` of ``nemo_automodel``.

NeMo Automodel's adapters: which layers have them, and in which dtype.

Sources: ``components/_peft/lora.py`` and ``components/_peft/module_matcher.py`` of ``nemo_automodel``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trainatomy.workload.arguments import is_off
from trainatomy.workload.dialects.translation import Translation, configuration_of, names_in
from trainatomy.workload.overlay import get_key
from trainatomy.workload.section import spell_dtype

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


_RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"
_CLASS = "NeMoAutoModelForCausalLM"
_OPTIMIZERS = {"Adam": "torch.optim.Adam", "AdamW": "adamw_torch", "adam": "torch.optim.Adam", "adamw": "adamw_torch"}
_LENGTH = 512
"""Tokens of a sample where the file names no length: the default of a workload."""
_SHIFTED = frozenset(
    "make_squad_dataset make_xlam_dataset make_agent_chat_dataset ChatDataset ColumnMappedTextInstructionDataset "
    "ColumnMappedTextInstructionIterableDataset".split()
)
"""Datasets whose inputs leave out the last token, whose labels leave out the first (``formatting_utils.py``)."""
_NORMS = {"rms_norm": True, "rope": False, "swiglu": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
_LAYERS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Liger's layers without its losses: Automodel computes the loss outside of the model."""
_OF_MODEL = frozenset("trust_remote_code load_base_model use_sdpa_patching backend revision cache_dir".split())
"""Keys of ``model`` without effect on memory and time, and the section that ``_backend`` reads."""
_BACKEND: Mapping[str, tuple[Any, ...]] = {
    "attn": (None, "te", "sdpa"),  # te is used for packs only
    "rms_norm": (None, "torch_fp32", "torch"),
    "rope": (None, "torch"),
    "linear": (None, "torch"),
    "compile_attn": (None, False),
    "te_fp8": (None,),
    "cuda_graph": (None, {}),
}
"""Values of ``model.backend`` with which layers are PyTorch's."""


def translate(said: Translation) -> None:
    """Read the recipe, the GPUs and the batch, the model, adapters, the loss, the optimizer and FSDP."""
    if not _is_simulated(said):
        return
    said.set("loop", "pytorch")
    several = _spread(said)
    implementation = _model(said)
    _precision(said, several)
    read_adapters(said)
    _quantisation(said)
    _checkpointing(said, implementation, several=several)
    _loss(said)
    _optimizer(said)
    _data(said)


def _is_simulated(said: Translation) -> bool:
    """Return whether the recipe is the one that is simulated, and refuse the whole file if not."""
    key = "recipe._target_" if said.gives("recipe._target_") else "recipe"
    name = said.take(key)
    if name is not None and str(name).rpartition(".")[2] != _RECIPE:
        said.abandon(key, f"{str(name).rpartition('.')[2]}: not simulated; {_RECIPE} is")
        return False
    target = said.value("model._target_")
    if name is None and _CLASS not in str(target):
        key = "model._target_" if target is not None else "recipe"
        said.abandon(key, f"{target or 'is missing'}: not simulated; {_RECIPE} with {_CLASS} is")
        return False
    if name is None:
        said.assume(f"the recipe is {_RECIPE} (recipe)")
    return True


def _size(said: Translation, name: str) -> int | None:
    """Return a degree of parallelism; None where it is left to Automodel."""
    key = f"distributed.{name}"
    value = said.value(key)
    if value is None or is_off(value):
        said.take(key)
        return None
    return said.count(key, 1)


def _spread(said: Translation) -> bool:
    """Read how many GPUs there are, what each does, and the batch of each; return whether there are several."""
    for name, what in (
        ("tp_size", "tensor parallelism by Automodel's plans, which also shard embeddings and the output layer"),
        ("pp_size", "Automodel's pipelines"),
        ("ep_size", "experts on different GPUs"),
    ):
        if (_size(said, name) or 1) > 1:
            said.refuse(f"distributed.{name}", f"not simulated: {what}")
    contexts, ranks = _size(said, "cp_size") or 1, _size(said, "dp_size")
    started = said.take("nproc_per_node")
    if started is not None and "parallel.gpus" not in said.counts:
        said.set("parallel.gpus", said.count("nproc_per_node", 1), "nproc_per_node")
    elif get_key(said.mapping, ("parallel", "gpus")) is None:
        said.set("parallel.gpus", (ranks or 1) * contexts, "distributed.dp_size", "distributed.cp_size")
        if ranks is None:
            said.assume("one GPU (distributed.dp_size); give --gpus, or the command with --nproc-per-node")
    parallel = said.mapping["parallel"]
    world = int(parallel["gpus"]) * int(parallel.get("nodes", 1))
    if world % contexts or (ranks is not None and ranks * contexts != world):
        key = "distributed.dp_size" if ranks is not None else "distributed.cp_size"
        said.reject(key, f"dp_size {ranks or 'none'} × cp_size {contexts} does not give the {world} GPUs")
    if contexts > 1:
        said.set("parallel.cp_size", contexts, "distributed.cp_size")
    _batch(said, max(world // contexts, 1))
    _strategy(said, several=world > 1)
    return world > 1


def _batch(said: Translation, ranks: int) -> None:
    """Read the samples of a GPU and of all, whose quotient is the accumulation (``StepScheduler``)."""
    local, whole = said.count("step_scheduler.local_batch_size", 1), "step_scheduler.global_batch_size"
    samples = said.count(whole, 1)
    for key in ("max_steps", "num_epochs"):
        said.take(f"step_scheduler.{key}")
    said.set("train.per_device_train_batch_size", local, "step_scheduler.local_batch_size")
    if samples % (local * ranks):
        said.reject(
            whole,
            f"{samples} is no multiple of {local} samples × {ranks} data-parallel ranks, as Automodel asks; give the "
            "number of GPUs with --gpus",
        )
    said.set("train.gradient_accumulation_steps", max(samples // (local * ranks), 1), whole)
    size = said.take("dataloader.batch_size")
    if size is not None and size != local:
        said.refuse("dataloader.batch_size", f"{size}: not simulated: batches of another size than local_batch_size")


def _strategy(said: Translation, *, several: bool) -> None:
    """Read DDP and FSDP2, which Automodel does not use on one GPU."""
    strategy = str(said.take("distributed.strategy", "fsdp2")).lower()
    if strategy not in ("fsdp2", "ddp"):
        said.refuse("distributed.strategy", f"{strategy}: not simulated; fsdp2 and ddp are")
        return
    policy, offload = said.section("distributed.mp_policy"), said.section("distributed.offload_policy")
    reshard, copies = said.take("distributed.reshard_after_forward"), _size(said, "dp_replicate_size")
    defers, buffers = said.take("distributed.defer_fsdp_grad_sync", True), said.take("distributed.broadcast_buffers")
    if not several:
        return
    said.set("parallel.strategy", strategy, "distributed.strategy")
    if strategy == "ddp":
        said.set("parallel.broadcast_buffers", bool(buffers), "distributed.broadcast_buffers")
        return
    param = spell_dtype(policy.get("param_dtype", "bfloat16"))
    said.set("parallel.mp_policy.param_dtype", param, "distributed.mp_policy.param_dtype")
    reduce = spell_dtype(policy.get("reduce_dtype", "float32"))
    said.set("parallel.mp_policy.reduce_dtype", reduce, "distributed.mp_policy.reduce_dtype")
    output = spell_dtype(policy.get("output_dtype", param))
    if output != param:
        said.refuse("distributed.mp_policy.output_dtype", f"{output}: not simulated: logits that FSDP casts")
    if not policy.get("cast_forward_inputs", True):
        said.refuse("distributed.mp_policy.cast_forward_inputs", "false: not simulated")
    said.set(
        "parallel.reshard_after_forward",
        "all_but_last" if reshard is None else reshard,
        "distributed.reshard_after_forward",
    )
    if not is_off(offload.get("_target_")):
        said.set("parallel.offload_policy", "cpu", "distributed.offload_policy._target_")
    if copies is not None and copies > 1:
        said.set("parallel.dp_replicate_size", copies, "distributed.dp_replicate_size")
    if is_off(defers):
        said.set("parallel.sync_each_batch", True, "distributed.defer_fsdp_grad_sync")


def _model(said: Translation) -> str:
    """Read the model; return whose implementation trains it: ``hf``, or ``same``, ``norms`` or ``own`` of Automodel."""
    keys = said.section("model")
    target = str(keys.pop("_target_", f"{_CLASS}.from_pretrained"))
    if f"{_CLASS}." not in target:
        said.refuse("model._target_", f"{target}: not simulated; {_CLASS}.from_pretrained and .from_config are")
        return "own"
    name, place = keys.pop("pretrained_model_name_or_path", None), "model.pretrained_model_name_or_path"
    if name is None:
        own = isinstance(keys.get("config"), str)
        place = "model.config" if own else "model.config.pretrained_model_name_or_path"
        name = keys.pop("config" if own else "config.pretrained_model_name_or_path", None)
    maker = str(keys.pop("config._target_", "AutoConfig"))
    if name is None or "AutoConfig" not in maker:
        said.refuse("model.config._target_" if name else "model._target_", "names no configuration of transformers")
        return "own"
    said.set("model.id", name, place)
    for key in [key for key in keys if key.startswith("config.")]:
        value = keys.pop(key)
        if key != "config.trust_remote_code":
            said.set(f"model.{key}", value, f"model.{key}")
    dtype = keys.pop("torch_dtype", None)
    chosen = "auto" if dtype is None else spell_dtype(dtype)
    chosen = "bfloat16" if chosen == "auto" and target.endswith("from_config") else chosen
    said.set("model.dtype", chosen, "model.torch_dtype")
    forced, liger = not is_off(keys.pop("force_hf", False)), not is_off(keys.pop("use_liger_kernel", True))
    _attention(said, keys.pop("attn_implementation", None))
    if (cache := keys.pop("use_cache", None)) is not None:
        said.set("train.use_cache", cache, "model.use_cache")
    if not is_off(keys.pop("output_hidden_states", False)):
        said.refuse("model.output_hidden_states", "not simulated: hidden states of all layers that are kept")
    for key in keys:
        if key.partition(".")[0] not in _OF_MODEL:
            said.refuse(f"model.{key}", f"not simulated: an argument of {_CLASS} that is not known")
    found = "hf" if forced else _implementation(said, str(name), place)
    _kernels(said, found, liger=liger)
    return found


def _attention(said: Translation, named: Any) -> None:
    if named is None:
        said.assume("attention by sdpa; with flash-attn installed it is flash_attention_2 (model.attn_implementation)")
    elif named not in ("sdpa", "eager", "flash_attention_2"):
        said.refuse("model.attn_implementation", f"{named}: not simulated; sdpa, eager and flash_attention_2 are")
        return
    said.set("model.attn_implementation", named or "sdpa", "model.attn_implementation")


def _implementation(said: Translation, name: str, key: str) -> str:
    """Return whose implementation of a model is used; quantised weights are loaded by transformers."""
    if not is_off(said.value("quantization.load_in_4bit")) or not is_off(said.value("quantization.load_in_8bit")):
        return "hf"
    architectures = configuration_of(name).get("architectures") or [None]
    if architectures[0] is None:
        said.refuse(
            key,
            f"{name}: its architecture is not known here, and Automodel has implementations of its own for some: give "
            "the folder of its config.json, or set model.force_hf: true to predict transformers'",
        )
        return "hf"
    kinds = said.table.presets["implementations"]
    found = next((kind for kind, names in kinds.items() if architectures[0] in names), "hf")
    if found == "own":
        said.refuse(
            key,
            f"{name}: not simulated: Automodel's own implementation of {architectures[0]}; set model.force_hf: true to "
            "predict transformers'",
        )
    return found


def _kernels(said: Translation, implementation: str, *, liger: bool) -> None:
    """Read Liger's layers, which Automodel uses in models of transformers, and its own norms."""
    if implementation in ("same", "norms"):
        for key, value in said.section("model.backend").items():
            name = key.partition(".")[0]
            if value not in _BACKEND.get(name, (value,)) or (name in ("te_fp8", "cuda_graph") and not is_off(value)):
                said.refuse(f"model.backend.{key}", f"{value}: not simulated: layers that are not PyTorch's")
    if implementation == "norms":
        said.set("train.use_liger_kernel", True)
        said.set("train.liger_kernel_config", dict(_NORMS))
        said.assume("norms, which Automodel compiles, are computed by Liger's kernel (model.backend.rms_norm)")
    elif implementation == "hf" and liger and (_size(said, "cp_size") or 1) == 1:
        said.set("train.use_liger_kernel", True, "model.use_liger_kernel")
        said.set("train.liger_kernel_config", dict(_LAYERS))
        if not said.gives("model.use_liger_kernel"):
            said.assume("Liger's layers, as where liger-kernel is installed (model.use_liger_kernel)")


def _precision(said: Translation, several: bool) -> None:
    """Read what trains in another dtype than that of the weights: DDP on one GPU casts the model."""
    if not several and str(said.value("distributed.strategy", "fsdp2")).lower() == "ddp":
        said.set("model.dtype", "bfloat16", "distributed.strategy")
    is_wide = get_key(said.mapping, ("model", "dtype")) == "float32"
    if several and is_wide and said.section("peft"):
        said.refuse("model.torch_dtype", "float32: not simulated with peft: Automodel casts frozen weights with FSDP2")


def _quantisation(said: Translation) -> None:
    keys = said.section("quantization")
    four, eight = not is_off(keys.get("load_in_4bit")), not is_off(keys.get("load_in_8bit"))
    if not four and not eight:
        return
    said.set("model.quantization.prepare_model_for_kbit_training", False)
    if eight and not four:
        said.set("model.quantization.load_in_8bit", True, "quantization.load_in_8bit")
        return
    said.set("model.quantization.load_in_4bit", True, "quantization.load_in_4bit")
    defaults = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "bfloat16",
    }
    for name, default in defaults.items():
        value = keys.get(name, default)
        value = spell_dtype(value) if name.endswith(("dtype", "storage")) else value
        said.set(f"model.quantization.{name}", value, f"quantization.{name}")


def _checkpointing(said: Translation, implementation: str, *, several: bool) -> None:
    """Read checkpointing: of whole layers in models of transformers, of their parts in Automodel's own."""
    key = "distributed.activation_checkpointing"
    wanted = said.take(key, False)
    if is_off(wanted):
        said.set("train.gradient_checkpointing", False, key)
        return
    if str(wanted).lower() not in ("true", "on", "full", "yes", "enabled"):
        said.refuse(key, f"{wanted}: not simulated: checkpointing that keeps some operations")
    elif implementation != "hf":
        said.refuse(
            key,
            "not simulated: attention, MLP and norms that are checkpointed one by one, as in Automodel's own models; "
            "model.force_hf: true checkpoints layers, which is simulated",
        )
    elif several and str(said.value("distributed.strategy", "fsdp2")).lower() == "ddp":
        said.refuse(key, "not simulated with ddp: attention, MLP and norms that are checkpointed one by one")
    else:
        said.set("train.gradient_checkpointing", True, key)
        said.set("train.gradient_checkpointing_kwargs", {"use_reentrant": False}, key)


def _loss(said: Translation) -> None:
    keys = said.section("loss_fn")
    target = str(keys.pop("_target_", "MaskedCrossEntropy")).rpartition(".")[2]
    if target != "MaskedCrossEntropy":
        what = {
            "FusedLinearCrossEntropy": "cut cross-entropy, which never stores logits",
            "TEParallelCrossEntropy": "Transformer Engine's cross-entropy",
            "ChunkedCrossEntropy": "a loss in chunks",
        }.get(target, "another loss")
        said.refuse("loss_fn._target_", f"{target}: not simulated: {what}; MaskedCrossEntropy is")
        return
    if is_off(keys.pop("fp32_upcast", True)):
        said.refuse("loss_fn.fp32_upcast", "false: not simulated: a loss in the dtype of the logits")
    for key in keys.keys() - {"ignore_index", "reduction"}:
        said.reject(f"loss_fn.{key}", "is no key of MaskedCrossEntropy")


def _optimizer(said: Translation) -> None:
    target = str(said.take("optimizer._target_", "torch.optim.AdamW"))
    module, _, name = target.rpartition(".")
    if name not in _OPTIMIZERS or module not in ("", "torch.optim"):
        said.refuse("optimizer._target_", f"{target}: not simulated; torch.optim.Adam and AdamW are")
    fused, foreach = said.take("optimizer.fused"), said.take("optimizer.foreach")
    chosen = _OPTIMIZERS.get(name, "adamw_torch")
    if not is_off(fused) and chosen == "adamw_torch":
        chosen, fused = "adamw_torch_fused", None
    said.set("train.optim", chosen, "optimizer._target_")
    given = {"fused": fused, "foreach": foreach}
    if options := ",".join(f"{key}={value}" for key, value in given.items() if value is not None):
        said.set("train.optim_args", options, "optimizer.fused", "optimizer.foreach")
    betas, epsilon = said.take("optimizer.betas"), said.take("optimizer.eps")
    if betas is not None and (not isinstance(betas, list | tuple) or len(betas) != 2):
        said.reject("optimizer.betas", f"must be two numbers, found {betas!r}")
    elif betas is not None:
        for number, beta in enumerate(betas, start=1):
            said.set(f"train.adam_beta{number}", beta, "optimizer.betas")
    if epsilon is not None:
        said.set("train.adam_epsilon", _number(epsilon), "optimizer.eps")
    norm = said.take("clip_grad_norm.max_norm", 1.0)
    said.set("train.max_grad_norm", norm, "clip_grad_norm.max_norm")


def _number(value: Any) -> Any:
    """Return the number that a text such as ``1e-8`` is, which YAML does not read as one; else the value."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _data(said: Translation) -> None:
    """Read how long samples are, where the dataset has a length to which it cuts or fills them."""
    packs = said.take("packed_sequence.packed_sequence_size", 0)
    if not is_off(packs):
        said.refuse("packed_sequence.packed_sequence_size", f"{packs}: not simulated: packs of samples")
    keys = [f"dataset.{name}" for name in ("seq_length", "seq_len", "max_length")]
    limit = next((key for key in keys if said.gives(key)), None)
    length = said.count(limit, _LENGTH) if limit is not None else _LENGTH
    for each in keys:
        said.take(each)
    key = "dataloader.collate_fn"  # a function by its name, or a section
    key = f"{key}._target_" if said.gives(f"{key}._target_") else key
    collate = str(said.take(key, "default_collater")).rpartition(".")[2]
    if collate not in ("default_collater", "default_collate"):
        said.refuse(key, f"{collate}: not simulated; batches of default_collater are")
    multiple = said.count("dataloader.collate_fn.pad_seq_len_divisible", 1)
    fills = str(said.take("dataset.padding")) == "max_length"
    shifts = limit is not None and str(said.value("dataset._target_")).rpartition(".")[2] in _SHIFTED
    row = multiple * math.ceil((length - (shifts and not fills)) / multiple)
    if shifts and fills:
        said.set("data.padding", True, "dataset.padding")
    said.set("data.sequence_length", row, *keys)
    said.set("data.attention_mask", True)
    if limit is None:
        said.assume(f"every sample has {row} tokens: the dataset cuts none; give --sequence-length or --lengths-file")
    else:
        said.assume_length(row, limit)
    if not is_off(said.take("step_scheduler.val_every_steps")) and said.gives("validation_dataset._target_"):
        said.assume("validation between the steps is not counted (step_scheduler.val_every_steps)")
