"""The axes of a search: what can be varied in a workload, and the settings of each option.

Every option is a mapping from keys of the workload to values.  The option that describes the workload as it was given
has no settings.  An axis with a permission changes what is trained, so that the user has to allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainatomy.catalog.gpus import GPU
from trainatomy.errors import WorkloadError
from trainatomy.requests.fitting import CanApply, Translated
from trainatomy.search.plans import Axis, Option, axis_of, plan_axis
from trainatomy.workload.arguments import is_class_path, is_factory
from trainatomy.workload.data import DEFAULT_SEQUENCE_LENGTH, PREDICTED_IDS
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import (
    DEFAULT_MINI_BATCH_SIZE,
    compares_in_batch,
    is_of_sentence_transformers,
    losses,
)

AXES = (
    "batch",
    "mini_batch",
    "gradient_checkpointing",
    "optimizer_implementation",
    "attention",
    "allocator",
    "torch_empty_cache_steps",
    "plan",
    "gpus",
    "precision",
    "optimizer",
    "lora",
    "quantization",
    "sequence_length",
    "evaluation",
    "eval_batch",
)
"""Names of all axes; a workload has those of which it has more than one option.  ``gpus`` is searched one by one."""

_FUSED_NAMES = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}
_HAS_FUSED = frozenset({"sgd"})
_LOOPED = frozenset({"sgd", "adagrad", "rmsprop"})
_MINI_BATCHES = (4, 16)
"""Mini-batches into which a cached loss divides a batch; each of them is executed, so that many take long."""
_CHECKPOINTED = (4, 3, 2)
_LORA_RANKS = (16,)
_SHORTER = (2, 4)
_SHORTEST = 64
"""Tokens below which a shorter sequence is not proposed."""
_EVAL_ACCUMULATION = (8, 1)
_WITH_DEEPSPEED = frozenset(
    {"batch", "gradient_checkpointing", "attention", "allocator", "lora", "sequence_length", "evaluation", "eval_batch"}
)
"""Axes that DeepSpeed's configuration does not decide."""
_BATCH_OF_DEEPSPEED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def axes_of(workload: Workload, samples: int) -> tuple[Axis, ...]:
    """Return every axis of a workload, the batch size first; those with one option only are left out.

    Args:
        workload: The training.
        samples: Samples of an optimizer step on each data-parallel rank.
    """
    gpu = workload.resolve_gpu()
    axes: tuple[Axis, ...] = (
        batch_axis(workload, batch_sizes(workload, samples), samples),
        _mini_batch(workload, samples),
        checkpointing_axis(workload),
        _optimizer_implementation(workload),
        _attention(workload),
        _allocator(workload),
        _empty_cache(workload),
        _precision(workload, gpu),
        _optimizer(workload),
        _lora(workload),
        _quantization(workload),
        _sequence_length(workload),
        _evaluation(workload),
        _eval_batch(workload),
        plan_axis(workload),
    )
    if workload.train.deepspeed is not None:
        axes = tuple(axis for axis in axes if axis.name in _WITH_DEEPSPEED)
    return (axes[0], *(axis for axis in axes[1:] if len(axis.options) > 1))


def applicable(axes: tuple[Axis, ...], can_apply: CanApply) -> tuple[Axis, ...]:
    """Return the axes with those options only whose settings can be applied; the batch size stays first."""

    def kept(axis: Axis) -> Axis:
        options = tuple(each for each in axis.options if each.name == axis.given or can_apply(each.settings))
        can_be_leanest = axis.leanest in (option.name for option in options)
        return replace(axis, options=options, leanest=axis.leanest if can_be_leanest else "")

    rest = map(kept, axes[1:])
    return (axes[0], *(axis for axis in rest if len(axis.options) > 1))


def translated(axes: tuple[Axis, ...], translate: Translated) -> tuple[Axis, ...]:
    """Return the axes with the settings of each option as what is trained has them, without those that it cannot."""
    made = {axis.name: {each.name: translate(each.settings) for each in axis.options} for axis in axes}

    def kept(axis: Axis) -> Axis:
        said = made[axis.name]
        options = tuple(
            replace(each, settings=said[each.name] or {}) for each in axis.options if said[each.name] is not None
        )
        return replace(axis, options=options, leanest=axis.leanest if said.get(axis.leanest) is not None else "")

    rest = map(kept, axes[1:])
    return (kept(axes[0]), *(axis for axis in rest if len(axis.options) > 1))


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*low, *(number // each for each in low)}))


def batch_sizes(workload: Workload, samples: int) -> tuple[int, ...]:
    """Return the batches into which the samples of a step can be divided by accumulation, the smallest first.

    They are its divisors, or the one batch size that DeepSpeed's configuration sets.  Where the loss compares the
    samples of a batch, another number of accumulation steps would train otherwise.

    Raises:
        WorkloadError: The accumulation steps, which cannot be changed, do not divide the samples.
    """
    config, steps = workload.train.deepspeed or {}, workload.train.gradient_accumulation_steps
    if compares_in_batch(workload):
        if samples % steps:
            raise WorkloadError(
                f"{workload.sentence_transformers.loss} compares the samples of a batch, so that the {steps} "
                f"accumulation steps stay, which do not divide {samples} samples: give a multiple of {steps}",
                key="train.gradient_accumulation_steps",
            )
        return (samples // steps,)
    if all(config.get(name, "auto") == "auto" for name in _BATCH_OF_DEEPSPEED):
        return divisors(samples)
    return (workload.train.per_device_train_batch_size,)


def batch_axis(workload: Workload, sizes: tuple[int, ...], samples: int | None) -> Axis:
    """Return the axis of the batch size.

    Args:
        workload: The workload.
        sizes: Samples per batch.
        samples: Samples of an optimizer step on each data-parallel rank, which each size divides; ``None`` leaves
            ``gradient_accumulation_steps`` as it is.
    """

    def option(size: int) -> Option:
        settings: dict[str, object] = {"train.per_device_train_batch_size": size}
        if samples is not None:
            settings["train.gradient_accumulation_steps"] = samples // size
        return Option(str(size), settings)

    given = str(workload.train.per_device_train_batch_size)
    return Axis("batch", tuple(map(option, sizes)), given, leanest=str(sizes[0]))


def _mini_batch(workload: Workload, samples: int) -> Axis:
    """Return the axis of the mini-batches in which a cached loss embeds a batch; off is the loss that does not."""
    spec, name = workload.sentence_transformers, "mini_batch"
    plain = spec.row.plain or spec.loss
    cached = losses()[plain].cached
    if not is_of_sentence_transformers(workload) or cached is None:
        return Axis(name, (Option("given"),), "given")
    batch = samples // workload.train.gradient_accumulation_steps
    key = "sentence_transformers"
    options = [Option("off", {f"{key}.loss": plain, f"{key}.mini_batch_size": None})]
    sizes = (batch // parts for parts in _MINI_BATCHES if batch >= parts)
    options += [Option(str(size), {f"{key}.loss": cached, f"{key}.mini_batch_size": size}) for size in sizes]
    given = "off" if spec.row.cached else str(spec.mini_batch_size or DEFAULT_MINI_BATCH_SIZE)
    return axis_of(name, options, given, leanest=options[-1].name)


def checkpointing_axis(workload: Workload) -> Axis:
    """Return the axis of gradient checkpointing: off, every n-th layer, all layers."""
    train = workload.train

    def option(name: str, *, on: bool, every: int = 1) -> Option:
        settings: dict[str, object] = {"train.gradient_checkpointing": on}
        if every != train.gradient_checkpointing_every:
            settings["train.gradient_checkpointing_every"] = every
        return Option(name, settings)

    options = [
        option("off", on=False),
        *(option(f"every_{count}", on=True, every=count) for count in _CHECKPOINTED),
        option("on", on=True),
    ]
    every = train.gradient_checkpointing_every
    given = "off" if not train.gradient_checkpointing else "on" if every == 1 else f"every_{every}"
    return axis_of("gradient_checkpointing", options, given, leanest="on")


def _optimizer_implementation(workload: Workload) -> Axis:
    """Return the axis of implementations of the same optimizer: fused, foreach, a loop over parameters."""
    train, arguments = workload.train, workload.train.optimizer_arguments()
    name = "optimizer_implementation"
    is_adamw = train.optim in _FUSED_NAMES
    if not is_adamw and train.optim not in _LOOPED:
        return Axis(name, (Option("given"),), "given")
    given = _FUSED_NAMES.get(train.optim, "foreach")
    if arguments.get("fused"):
        given = "fused"
    elif given == "foreach" and arguments.get("foreach") is False:
        given = "for_loop"
    rest = _without(train.optim_args, ("fused", "foreach"))
    plain = "adamw_torch" if is_adamw else train.optim

    def option(kind: str, optim: str, extra: str = "") -> Option:
        settings = {"train.optim": optim, "train.optim_args": ",".join(filter(None, (rest, extra))) or None}
        return Option(kind, settings)

    options = [option("foreach", plain), option("for_loop", plain, "foreach=False")]
    if is_adamw:
        options.insert(0, option("fused", "adamw_torch_fused"))
    elif train.optim in _HAS_FUSED:
        options.insert(0, option("fused", train.optim, "fused=True"))
    return axis_of(name, options, given, leanest="fused" if options[0].name == "fused" else "for_loop")


def _without(optim_args: str | None, names: tuple[str, ...]) -> str:
    """Return ``optim_args`` without the arguments of those names."""
    parts = (optim_args or "").replace(" ", "").split(",")
    return ",".join(part for part in parts if part and part.partition("=")[0] not in names)


def _attention(workload: Workload) -> Axis:
    """Return the axis of attention implementations that PyTorch and transformers bring along.

    transformers' own choice, the default, is SDPA wherever the model has it.
    """
    given = workload.model.attn_implementation or "default"
    names = () if workload.model.factory else ("eager",) if given == "default" else ("sdpa", "eager")
    options = [Option(name, {"model.attn_implementation": name}) for name in names]
    return axis_of("attention", options, given, leanest="sdpa" if given == "eager" else "")


def _allocator(workload: Workload) -> Axis:
    """Return the axis of the allocator: as given, or with expandable segments."""
    if "expandable_segments" in workload.allocator:
        return Axis("allocator", (Option("given"),), "given")
    text = ",".join(filter(None, (workload.allocator, "expandable_segments:True")))
    return axis_of("allocator", [Option("expandable_segments", {"allocator": text})], "default")


def _empty_cache(workload: Workload) -> Axis:
    """Return the axis of emptying the allocator's cache, which only the Trainer's loop does."""
    steps = workload.train.torch_empty_cache_steps
    given = "never" if steps is None else "every_step" if steps == 1 else f"every_{steps}_steps"
    options = [Option("never", {"train.torch_empty_cache_steps": None})]
    if LOOPS[workload.loop].by_trainer:
        options.append(Option("every_step", {"train.torch_empty_cache_steps": 1}))
    return axis_of("torch_empty_cache_steps", options, given)


def _precision(workload: Workload, gpu: GPU) -> Axis:
    """Return the axis of precisions: those for which the GPU has arithmetic units."""
    options = list(_precisions(workload, gpu))
    return axis_of("precision", options, precision_of(workload), "precision", leanest="bf16_weights")


def _precisions(workload: Workload, gpu: GPU) -> Iterator[Option]:
    mixed: dict[str, object] = {"train.fp16": False, "train.bf16": False, "train.tf32": None}
    weights: dict[str, object] = {} if workload.model.factory else {"model.dtype": "float32"}
    yield Option("fp32", {**mixed, **weights})
    if "tf32" in gpu.rates:
        yield Option("tf32", {**mixed, **weights, "train.tf32": True})
    if "fp16" in gpu.rates:
        yield Option("fp16", {**mixed, **weights, "train.fp16": True})
    if "bf16" in gpu.rates:
        yield Option("bf16", {**mixed, **weights, "train.bf16": True})
        if weights:
            yield Option("bf16_weights", {**mixed, "model.dtype": "bfloat16"})


def precision_of(workload: Workload) -> str:
    """Return the name of the option that describes the workload's precision."""
    train, dtype = workload.train, workload.model.dtype
    if dtype in ("auto", "float32"):
        mixed = "fp16" if train.fp16 else "bf16" if train.bf16 else ""
        if dtype == "auto" and not workload.model.factory:
            return f"{mixed}_auto" if mixed else "auto"
        return mixed or ("tf32" if train.tf32 else "fp32")
    if dtype == "bfloat16" and not train.fp16 and not train.bf16:
        return "bf16_weights"
    return f"{dtype}_weights" + ("_fp16" if train.fp16 else "_bf16" if train.bf16 else "")


def _optimizer(workload: Workload) -> Axis:
    """Return the axis of optimizers; each keeps the learning rate, which is not the best one for all of them."""
    optim = workload.train.optim
    given = "adamw" if optim in _FUSED_NAMES else optim
    names = {
        "adamw": "adamw_torch_fused",
        "adamw_8bit": "adamw_bnb_8bit",
        "paged_adamw_8bit": "paged_adamw_8bit",
        "adafactor": "adafactor",
        "sgd": "sgd",
    }
    if is_class_path(optim):
        given = optim.rpartition(".")[2]
    elif is_factory(optim):
        given = optim.rpartition(":")[2]
    given = next((name for name, value in names.items() if value == optim), given)
    options = [Option(name, {"train.optim": value, "train.optim_args": None}) for name, value in names.items()]
    return axis_of("optimizer", options, given, "optimizer", leanest="sgd")


def _lora(workload: Workload) -> Axis:
    """Return the axis of low-rank adapters on all linear layers."""
    if workload.model.lora is not None:
        return Axis("lora", (Option(f"r{workload.model.lora.r}"),), f"r{workload.model.lora.r}", "lora")
    adapters = [
        Option(f"r{rank}", {"model.lora": {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}})
        for rank in _LORA_RANKS
    ]
    return axis_of(
        "lora",
        adapters if not workload.model.says_what_is_trained else [],
        "none",
        "lora",
        leanest=f"r{_LORA_RANKS[0]}",
    )


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""4-bit weights as in "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv 2305.14314)."""
_UNPREPARED = {"prepare_model_for_kbit_training": False}
"""peft's function casts 16-bit weights that are not quantised to float32, and with them all activations."""


def _quantization(workload: Workload) -> Axis:
    """Return the axis of quantised weights; ``Space.is_valid`` lets only a training of adapters have them."""
    model, parallel, kinds = workload.model, workload.parallel, list[Option]()
    if model.factory is None and not model.says_what_is_trained and not workload.era:
        is_fp16 = "bf16" not in workload.resolve_gpu().rates or model.dtype == "float16" or workload.train.fp16
        dtype = "float16" if is_fp16 else "bfloat16"
        in_4_bits: dict[str, object] = {**_NF4, "bnb_4bit_compute_dtype": dtype, **_UNPREPARED}
        if parallel.world_size > 1:
            in_4_bits["bnb_4bit_quant_storage"] = dtype  # which FSDP2 shards
        kinds.append(Option("nf4", {"model.quantization": in_4_bits}))
        kinds.append(Option("int8", {"model.quantization": {"load_in_8bit": True, **_UNPREPARED}}))
    if model.quantization is None:
        return axis_of("quantization", kinds, "none", "quantization", leanest="nf4")
    given = Option("given")
    return Axis("quantization", (given,), given.name, "quantization")


def _sequence_length(workload: Workload) -> Axis:
    """Return the axis of sequence lengths: as given, a half, a quarter."""
    length = workload.data.sequence_length or DEFAULT_SEQUENCE_LENGTH
    given = str(workload.data.sequence_length or "default")
    shorter = [length // part for part in _SHORTER if length // part >= _SHORTEST]
    options = [] if workload.data.factory else [Option(str(each), {"data.sequence_length": each}) for each in shorter]
    shortest = options[-1].name if options else ""
    return axis_of("sequence_length", options, given, "sequence-length", leanest=shortest)


def _evaluation(workload: Workload) -> Axis:
    """Return the axis of what evaluations during the training gather on the GPU."""
    options = list[Option]()
    if workload.evaluates and workload.gathers_outputs:
        for steps in _EVAL_ACCUMULATION:
            options.append(Option(f"accumulate_{steps}", {"train.eval_accumulation_steps": steps}))
        if workload.data.preprocess_logits_for_metrics is None and not workload.train.predict_with_generate:
            options.append(Option("predicted_ids", {"data.preprocess_logits_for_metrics": PREDICTED_IDS}))
        options.append(Option("loss_only", {"train.prediction_loss_only": True}))
    return axis_of("evaluation", options, "given", "evaluation", leanest="accumulate_1")


def _eval_batch(workload: Workload) -> Axis:
    """Return the axis of batch sizes of evaluations during the training: as given, a half, one sample."""
    size = workload.eval_batch_size
    smaller = sorted({size // 2, 1} - {0, size}, reverse=True) if workload.evaluates else []
    options = [Option(str(each), {"train.per_device_eval_batch_size": each}) for each in smaller]
    return axis_of("eval_batch", options, str(size), "evaluation", leanest="1")
