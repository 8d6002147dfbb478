"""Notes on the description of a training: what is left out, or done otherwise than the user may expect.

Notes on what is assumed of the images and recordings of a sample, and on what becomes of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.instances import find_instance
from trainatomy.catalog.links import points_of
from trainatomy.catalog.versions import behaviour, parse_version, version_note, version_text
from trainatomy.libraries import version_of
from trainatomy.results.prediction import LeadingNote, fsdp_version
from trainatomy.simulator.adapters.registry import adapter_notes
from trainatomy.training.image_layout import SEVERAL, rule_of
from trainatomy.training.images import PIX2STRUCT_PATCHES, REGIONS, has_assumed_length
from trainatomy.training.lengths import drawn_lengths
from trainatomy.training.model import unwrap, weights_dtype
from trainatomy.training.optimizer import needs_closure
from trainatomy.training.positions import Lengths, is_of_trl, lengths, sequence_note
from trainatomy.training.samples import input_names
from trainatomy.training.sentence_transformers import normalizes, pooling_of
from trainatomy.training.shape import Shape, shape_of
from trainatomy.units import by, human_bytes, many
from trainatomy.workload.fsdp import SHARDING_STRATEGY
from trainatomy.workload.loops import loop_of
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import compares_in_batch, is_of_sentence_transformers, model_on_hub
from trainatomy.workload.trl import max_length, packing_strategy, steps_per_generation

if TYPE_CHECKING:
    from trainatomy.workload.data import DataSpec


_OTHERS = "data.factory makes others"


def sample_notes(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield notes on the images and recordings of a sample; what was decided for the user leads."""
    if workload.data.factory is not None or not hasattr(unwrap(model), "config"):
        return
    if workload.data.varying_media:
        return
    shape = shape_of(model, Lengths(0, 0), workload.data)
    names = input_names(shape)
    if is_of_trl(workload):
        if "pixel_values" in names:
            yield LeadingNote("samples hold text only: the trainers of TRL are simulated without images")
        return
    if "pixel_values" in names or shape.main_input == "pixel_values_videos":
        yield from _assumed_images(shape, workload.data)
        yield from _changed_images(shape)
    if "flattened_patches" in names:
        yield LeadingNote(f"one image of {PIX2STRUCT_PATCHES:,} patches per sample, assumed; {_OTHERS}")
    if {"visual_feats", "visual_embeds"}.intersection(names):
        yield LeadingNote(f"{REGIONS} regions of an image per sample, assumed; {_OTHERS}")
    if any(has_assumed_length(shape, name) for name in names):
        yield LeadingNote(f"a recording of 10 seconds per sample, assumed; {_OTHERS}")


def _assumed_images(shape: Shape, data: DataSpec) -> Iterator[str]:
    """Yield which images a sample is taken to have, with the flags that change it."""
    may_be_several = bool(shape.image_token) and getattr(shape.config, "model_type", "") in SEVERAL
    changes = ["--image-size"] if data.image_size is None and _has_a_choice(shape) else []
    changes += ["--images"] if data.images is None and may_be_several else []
    is_unknown = data.images is None and shape.image_token is not None and rule_of(shape) is None
    if data.image_size is not None or not (changes or is_unknown):
        return
    count = "one image" if shape.images == 1 else many(shape.images, "image")
    whole = ", not cut into tiles" if _is_cut(shape) else ""
    what = f"{count} of {by(shape.original_size)} per sample{whole}"
    then = f"{' and '.join(changes)} change{'s' if len(changes) == 1 else ''} it" if changes else _OTHERS
    yield LeadingNote(f"{what}, assumed; {then}")


def _has_a_choice(shape: Shape) -> bool:
    """Return whether images of different sizes become something else, in a way that is known."""
    rule = rule_of(shape)
    _, side, _ = shape.default_image_size
    sizes = ((side, side), (side, 2 * side), (4 * side, 4 * side))
    return rule is not None and len({rule(shape, *size) for size in sizes}) > 1


def _is_cut(shape: Shape) -> bool:
    """Return whether a processor cuts an image of the default size into tiles, which is taken whole here."""
    rule = rule_of(shape)
    return rule is not None and rule(shape, *shape.original_size).views > shape.layout.views


def _changed_images(shape: Shape) -> Iterator[str]:
    """Yield what becomes of images of a size that the user gave."""
    if shape.asked_size is None:
        return
    layout, asked = shape.layout, by(shape.asked_size)
    size = by((layout.height, layout.width))
    tokens = f": {many(shape.image_tokens, 'token')} each" if shape.image_tokens else ""
    if layout.rows:
        grid = by((layout.rows, layout.columns))
        beside = " beside the whole image" if layout.has_whole else ""
        yield f"images of {asked} are cut into {grid} tiles of {size}{beside}{tokens}"
    elif asked != size:
        names_size = shape.vision is shape.config and hasattr(shape.config, "image_size")
        other = "; --config image_size=… makes a model for others" if names_size else ""
        yield f"images of {asked} are resized to {size}, which {shape.class_name} takes{tokens}{other}"


_KINDS = {"float16": "fp16", "bfloat16": "bf16"}
"""Types of 16 bits, as dtypes and as settings of ``TrainingArguments``."""

_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def version_notes(torch_version: tuple[int, int], capability: tuple[int, int]) -> Iterator[str]:
    """Yield a note for each library whose release was never checked, and where builds have no kernels for the GPU."""
    for library, version in (
        ("torch", torch_version),
        ("transformers", parse_version(version_of("transformers") or "0.0")),
    ):
        note = version_note(library, version)
        if note is not None:
            yield note
    known, release = behaviour("oldest_capability_with_kernels", torch_version), version_text(torch_version)
    gpus = f"GPUs of compute capability {'.'.join(map(str, capability))}"
    if capability < tuple(known["any"]):
        yield f"no build of PyTorch {release} has kernels for {gpus}: no step of it runs there"
    elif capability < tuple(known["pypi"]):
        yield f"the build of PyTorch {release} on PyPI has no kernels for {gpus}: install one from {known['index']}"


Note = str | Callable[["Workload"], Iterator[str]]
"""A sentence, or what returns sentences on a training: one execution serves several GPUs and files."""


def notes_of(notes: Iterable[Note], workload: Workload) -> Iterator[str]:
    """Yield notes on a training, with those on its GPU."""
    for note in notes:
        if isinstance(note, str):
            yield note
        else:
            yield from note(workload)


def notes_on(workload: Workload, model: nn.Module) -> tuple[Note, ...]:
    """Return notes on the description of the training."""
    return (
        _origin_notes,
        *_batch_norm(workload, model),
        *_dropped_layers(workload, model),
        *_data_parallel(workload),
        *_shared_experts(workload),
        *_length_note(workload, model),
        *sample_notes(workload, model),
        *_duration_notes(workload),
        *_sampling(workload),
        *_evaluation_notes(workload),
        *adapter_notes(workload, model),
        *_trl_notes(workload, model),
        *_embedding_notes(workload, model),
        partial(_precision_notes, dtype=str(weights_dtype(workload, model))),
        *_closure_notes(workload),
        *_layerwise_notes(workload),
        *_sharding_notes(workload),
        *_host_collective_notes(workload),
        _era_notes,
        _unified_memory_notes,
        _link_notes,
        _instance_notes,
    )


def _origin_notes(workload: Workload) -> Iterator[str]:
    """Yield what the framework does whose configuration was read, where that says nothing."""
    origin = workload.origin
    if origin is not None and origin.assumed:
        yield LeadingNote(f"{origin.name}: {'; '.join(origin.assumed)}")


def _unified_memory_notes(workload: Workload) -> Iterator[str]:
    """Yield what shares the memory of the GPU."""
    gpu = workload.resolve_gpu()
    if gpu.unified_memory:
        yield LeadingNote(
            f"the {gpu.name} has one memory of {human_bytes(gpu.memory_bytes)} for the CPU and the GPU, and only what "
            "the GPU holds is predicted: what the system, the processes and their data loaders hold, and what is "
            "offloaded to host memory, comes off the same budget. Compare with what `free` shows as available"
        )


def _link_notes(workload: Workload) -> Iterator[str]:
    """Yield which links between GPUs were not measured."""
    gpus, links = workload.parallel.gpus, workload.parallel.links(workload.resolve_gpu())
    link = links.within(gpus) if links is not None and gpus > 1 else None
    if link is not None and link.kind == "pcie" and not points_of(link.id) and not points_of(link.like):
        yield (
            f"collectives over {link.name} are predicted at the speed that NCCL counts with; of two machines whose "
            "times were published, one reached half of it from four GPUs on and one a tenth. `trainatomy calibrate "
            f"--gpus {gpus}` measures yours"
        )


def _instance_notes(workload: Workload) -> Iterator[str]:
    """Yield what a named machine is, and what it costs."""
    if workload.instance is None:
        return
    gpu, gpus = workload.resolve_gpu(), workload.parallel.gpus
    machine = find_instance(workload.instance)
    price = "no list price is known"
    if machine.usd_per_hour is not None:
        price = f"{machine.usd_per_hour:,.2f} USD an hour on demand in {machine.price_region} on {machine.price_date}"
    processor = f" ({machine.processor})" if machine.processor else ""
    used = "" if gpus == machine.gpus or gpu.slice_of else f", of which {gpus} are used"
    yield (
        f"{machine.id} ({machine.provider}): {machine.gpus} × {find_gpu(machine.gpu).name}{used}, "
        f"{machine.vcpus} virtual processors{processor}, {human_bytes(machine.host_memory_bytes)} of host memory; "
        f"{price}. The times of the CPU are those of the reference host: none was measured on this machine"
    )


def _era_notes(workload: Workload) -> Iterator[str]:
    """Yield what emulating the libraries of an era leaves as it is today."""
    if workload.era is None:
        return
    gpu = workload.resolve_gpu()
    unknown = f", and so is the CUDA context: none of then is known for the {gpu.name}"
    later = "" if "eager-cuda-11" in gpu.contexts else unknown
    yield LeadingNote(
        f"era {workload.era}: memory is that of the libraries of then; the times of kernels are those of today's{later}"
    )


def _duration_notes(workload: Workload) -> Iterator[str]:
    """Yield a note where the length of the whole training was given and is not known in steps."""
    data, train = workload.data, workload.train
    known = train.max_steps is not None or data.lengths is not None or data.train_samples is not None
    if train.num_train_epochs is not None and not known:
        yield (
            "train.num_train_epochs has no effect on memory or the time of a step; how long all steps take is said "
            "with the number of samples (data.train_samples), their lengths (data.lengths), or train.max_steps"
        )


def _layerwise_notes(workload: Workload) -> Iterator[str]:
    """Yield what the time leaves out where an optimizer updates each parameter when its gradient arrives."""
    if workload.train.optim in ("lomo", "adalomo"):
        yield (
            "the hooks of LOMO and AdaLomo go through all parameters at each gradient, which the predicted time leaves "
            "out: on an H200 a LOMO and an AdaLomo training took 2.5 and 1.9 times as long (lomo-optim 0.1.1)"
        )


def _sharding_notes(workload: Workload) -> Iterator[str]:
    """Yield a note where accelerate passes over a sharding strategy of FSDP1."""
    train = workload.train
    config = train.fsdp_config or {}
    named = [str(each) for each in (train.fsdp if isinstance(train.fsdp, tuple) else (train.fsdp,))]
    asked = [str(config.get("reshard_after_forward", "full_shard")).lower(), *" ".join(named).lower().split()]
    passed = {"shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"}.intersection(asked)
    is_first = workload.loop == "trainer" and bool(train.fsdp) and fsdp_version(config) == 1
    if is_first and passed and SHARDING_STRATEGY not in config:
        yield (
            f"train.fsdp_config: accelerate (1.15) does not read {passed.pop()} from TrainingArguments with FSDP1, and "
            "shards fully. It reads the variable FSDP_SHARDING_STRATEGY, which accelerate launch sets: give it as "
            "train.fsdp_config.sharding_strategy, or use --launch"
        )


def _host_collective_notes(workload: Workload) -> Iterator[str]:
    """Yield a note where gradients in host memory are clipped, for which NCCL has no collective."""
    by_trainer = workload.loop != "pytorch" and workload.mode == "training"
    if by_trainer and workload.shards_on_host and workload.train.max_grad_norm:
        yield (
            "the norm of gradients in host memory is a collective of the CPU: `accelerate launch` with "
            "--fsdp_offload_params true starts gloo beside NCCL; under torchrun, TrainingArguments start NCCL alone, "
            'and PyTorch stops in the first step ("No backend type associated with device type cpu", PyTorch 2.11): '
            "set max_grad_norm to 0, or FSDP_OFFLOAD_PARAMS and ACCELERATE_USE_FSDP to true before they are made"
        )


def _closure_notes(workload: Workload) -> Iterator[str]:
    """Yield a note on what LBFGS decides by values."""
    if workload.mode == "training" and needs_closure(workload.train):
        yield (
            "LBFGS is assumed to make all its iterations, and to keep the direction of each in its history: the most "
            "that it can hold. It drops those whose curvature is below 1e-10, as with a small learning rate"
        )


def mask_notes(workload: Workload) -> Iterator[str]:
    """Yield a note where attention stores all its scores because samples of equal length need no mask."""
    if workload.data.factory is not None:
        return
    by_trl = workload.mode == "training" and loop_of(workload).settings is not None
    keys = "data.lengths" if by_trl else "data.padding: true or data.lengths"
    yield LeadingNote(
        "attention stores all its scores: all samples are taken to have one length, so that there is no mask, and "
        "without one PyTorch has no fused kernel for grouped queries in this precision on this GPU. Beside the mask of "
        f"samples that differ in length it has one, which takes less memory: describe them by {keys}"
    )


def _precision_notes(workload: Workload, dtype: str) -> Iterator[str]:
    """Yield a note where the GPU has no arithmetic units for a precision that the training uses."""
    gpu = workload.resolve_gpu()
    weights = _KINDS.get(dtype.removeprefix("torch."))
    used = {weights, *(kind for kind in _KINDS.values() if getattr(workload.train, kind))}
    for kind in (kind for kind in _KINDS.values() if kind in used and kind not in gpu.rates):
        instead = "; fp16 runs on its tensor cores" if "fp16" in gpu.rates and gpu.capability >= (7, 0) else ""
        yield (
            f"the {gpu.name} has no arithmetic units for {kind}: its products are timed at the rate of fp32, and may "
            f"take longer{instead}"
        )


def _trl_notes(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield notes on the samples of TRL's trainers."""
    if workload.mode != "training" or loop_of(workload).settings is None:
        return
    length, longest = lengths(workload, unwrap(model)).sequence, max_length(workload)
    if workload.loop == "kto":
        yield "half of the answers in each batch are labelled good, the others bad"
    if workload.loop == "grpo":
        yield (
            "every completion gets all its tokens (trl.max_completion_length); rewards come from a function on the "
            "host that takes no time"
        )
        if (period := steps_per_generation(workload)) > 1:
            yield (
                f"one of {period} steps generates: the time is that of the mean step; memory, operations and the first "
                "token are those of a step that generates"
            )
    elif workload.data.varies:
        yield from _cut_samples(workload)
    elif longest is not None and length > longest and not workload.trl.get("packing"):
        yield f"TRL cuts samples of {length} tokens to {longest}: raise trl.max_length to train on all of them"


def _embedding_notes(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield what is assumed of the samples and the pooling of an embedding model."""
    if not is_of_sentence_transformers(workload):
        return
    spec, known, length = (
        workload.sentence_transformers,
        model_on_hub(workload),
        lengths(workload, unwrap(model)).sequence,
    )
    if spec.negatives is None and spec.row.negatives is None:
        yield f"a sample is a pair of texts of {length} tokens; sentence_transformers.negatives adds hard negatives"
    if None in (spec.pooling, spec.normalize):
        whose = "sentence-transformers' default" if known is None else f"as {workload.model.id} on the hub has them"
        normalised = "with" if normalizes(workload) else "without"
        yield (
            f"{pooling_of(workload, model)} pooling {normalised} normalisation, {whose}: sentence_transformers.pooling "
            "and normalize say otherwise"
        )
    if known is not None and length > known.max_seq_length:
        yield (
            f"{workload.model.id} cuts texts to {known.max_seq_length} tokens: for {length}, a script sets "
            "model.max_seq_length"
        )
    if workload.parallel.data_parallel_size > 1 and compares_in_batch(workload) and not spec.gather_across_devices:
        yield f"each GPU compares the {workload.batch_size} samples of its own batch, not those of the other GPUs"
    if not workload.train.dataloader_num_workers:
        yield LeadingNote(
            "texts are tokenised between the steps, which is not predicted and often takes longer than the step of a "
            "small model: train.dataloader_num_workers has other processes do it"
        )


def _cut_samples(workload: Workload) -> Iterator[str]:
    """Yield a note on samples of different lengths that TRL cuts or leaves out."""
    longest, every = max_length(workload), drawn_lengths(workload)
    longer = sum(length > longest for length in every) if longest is not None else 0
    if longer and packing_strategy(workload) in (None, "bfd"):
        does = "leaves out" if workload.loop == "reward" else "cuts"
        yield f"TRL {does} {longer} of {len(every)} samples that have more than {longest} tokens (trl.max_length)"


def _evaluation_notes(workload: Workload) -> Iterator[str]:
    """Yield notes on what evaluations and checkpoints leave out."""
    train = workload.train
    if workload.model.lora is not None and (workload.saves or workload.resumes) and _finds_no_adapters(workload):
        yield (
            "train.fsdp: this release of peft looks for adapters by the names of modules, which FSDP1 changes: its "
            "checkpoints hold no adapters, and loading one restores none; with fsdp_config: {version: 2} they do"
        )
    if not workload.evaluates:
        return
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(train, name):
            yield (
                f"train.{name}: the Trainer casts the weights only for an evaluation outside of train(); evaluations "
                "during the training run in its precision"
            )


def _finds_no_adapters(workload: Workload) -> bool:
    """Return whether peft takes no adapters from a model of FSDP1 (0.21, ``get_peft_model_state_dict``)."""
    from peft.tuners import tuners_utils

    is_first = bool(workload.train.fsdp) and fsdp_version(workload.train.fsdp_config) == 1
    return is_first and hasattr(tuners_utils, "_get_tuner_state_dict_key_prefixes")


def _data_parallel(workload: Workload) -> Iterator[str]:
    """Yield notes on what ``DataParallel`` does otherwise than one GPU."""
    if workload.parallel.devices == 1:
        return
    train = workload.train
    wanted = "bf16" if train.bf16 else "fp16" if train.fp16 else None
    if wanted and workload.loop == "trainer":
        yield (
            f"the Trainer of transformers {version_of('transformers')} does not apply {wanted} to a model in "
            "DataParallel: it computes in the dtype of its weights; DDP applies it"
        )
    elif wanted == "bf16":
        yield "DataParallel's threads autocast to float16, also with bf16: use DDP for bfloat16"
    yield (
        "DataParallel: the step's time takes Python to run in one thread at a time, and the other GPUs to keep pace "
        "with this one; on two H200s, measured steps took from 0.8 to 2.2 times as long as predicted"
    )


def _batch_norm(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield a note where the statistics of a batch depend on how it is divided among GPUs."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if workload.parallel.data_parallel_size > 1 and any(isinstance(each, kinds) for each in model.modules()):
        yield (
            f"BatchNorm takes its statistics from the {workload.batch_size} samples of each GPU, so what is learnt "
            "depends on the batch size per GPU; torch.nn.SyncBatchNorm takes them from all GPUs"
        )


def _dropped_layers(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield a note where the model leaves out layers at random (LayerDrop), as Wav2Vec2 does by default."""
    config = getattr(unwrap(model), "config", None)
    names = [name for name in _LAYERDROP if (getattr(config, name, None) or 0) > 0]
    if not names or workload.mode != "training":
        return
    strategy, parallel = workload.parallel.strategy or "ddp", workload.parallel
    note = (
        f"model.config.{names[0]} leaves out layers at random (LayerDrop), by train.seed: peaks are those of the "
        "simulated steps, and a step with all layers may hold more"
    )
    reduces = workload.loop == "pytorch" and parallel.data_parallel_size > 1 and strategy in ("ddp", "zero1")
    if reduces and not parallel.find_unused_parameters:
        note += "; DDP raises an error after a step without all layers: set parallel.find_unused_parameters"
    yield note


def _sampling(workload: Workload) -> Iterator[str]:
    """Yield a note where samples are grouped by lengths that nobody gave."""
    if workload.train.train_sampling_strategy == "group_by_length" and workload.data.lengths is None:
        yield (
            "train.train_sampling_strategy: group_by_length: all samples have one length here; data.lengths says how "
            "they differ"
        )


def _shared_experts(workload: Workload) -> Iterator[str]:
    """Yield what is assumed of experts that ranks share."""
    if workload.parallel.enable_expert_parallel:
        yield "the time of a rank's experts takes the router to give the experts of each rank equally many rows"


def _length_note(workload: Workload, model: nn.Module) -> tuple[str, ...]:
    """Return a note on the length of samples, where they have one."""
    if workload.data.factory is not None or not hasattr(unwrap(model), "config"):
        return ()
    note = sequence_note(workload.data, model)
    return (note,) if note else ()
