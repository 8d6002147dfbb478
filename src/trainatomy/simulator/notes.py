"""Notes on what a simulation leaves out or does otherwise than the user may expect.

Notes on what is assumed of the images and recordings of a sample, and on what becomes of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from trainatomy.catalog.gpus import find_gpu, has_recorded_engines
from trainatomy.catalog.instances import find_instance
from trainatomy.catalog.links import points_of
from trainatomy.catalog.versions import behaviour, parse_version, version_note, version_text
from trainatomy.libraries import version_of
from trainatomy.operators.allocation.cudnn.backend import EXTRA
from trainatomy.results.operations import Call
from trainatomy.results.prediction import LeadingNote, fsdp_version
from trainatomy.results.trace import PlansTried
from trainatomy.simulator.adapters.registry import adapter_notes
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.storages import HostMemory
from trainatomy.simulator.values import Values
from trainatomy.training.image_layout import SEVERAL, rule_of
from trainatomy.training.images import PIX2STRUCT_PATCHES, REGIONS, has_assumed_length
from trainatomy.training.lengths import drawn_lengths
from trainatomy.training.model import unwrap, weights_dtype
from trainatomy.training.optimizer import needs_closure
from trainatomy.training.positions import Lengths, is_of_trl, lengths, sequence_note
from trainatomy.training.samples import input_names
from trainatomy.training.shape import Shape, shape_of
from trainatomy.units import by, human_bytes, many
from trainatomy.workload.fsdp import SHARDING_STRATEGY
from trainatomy.workload.loops import loop_of
from trainatomy.workload.schema import Workload
from trainatomy.workload.trl import max_length, packing_strategy, steps_per_generation

if TYPE_CHECKING:
    from trainatomy.workload.data import DataSpec


_OTHERS = "data.factory makes others"


def sample_notes(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield notes on the images and recordings of a sample; what was decided for the user leads."""
    if workload.data.factory is not None or not hasattr(unwrap(model), "config"):
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


_MAX_PLACES = 3
"""Places that a note names."""

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


def trial_notes(trials: Mapping[int, PlansTried], *, known: bool) -> Iterator[str]:
    """Yield a note where convolutions tried cuDNN's algorithms; ``known``: its library names them."""
    if not trials:
        return
    timed = max(each.timed for each in trials.values())
    yield (
        f"torch.backends.cudnn.benchmark is on: for {len(trials)} convolutions PyTorch tries cuDNN's algorithms in the "
        f"first call, with the largest workspace of all, and keeps the fastest of the first {timed} (torch.backends."
        "cudnn.benchmark_limit), here assumed to be the one that cuDNN's heuristics prefer; algorithms by FFT, which "
        "need the most and are named on a GPU only, are counted where an H200 mostly tried them"
    )
    if not known:
        yield f"without cuDNN's library only a few of these algorithms are known; the first step may need more: {EXTRA}"


def plan_notes(calls: Sequence[Call], cudnn: str | None) -> Iterator[str]:
    """Yield a note where a version of cuDNN chose convolutions' plans whose choices on a GPU were not recorded."""
    if cudnn is None or has_recorded_engines(cudnn):
        return
    if any(call.name.startswith("aten::convolution") for call in calls):
        yield (
            f"cuDNN {cudnn} names the plans of convolutions as it does without a driver; which others run on a GPU was "
            "recorded with 9.19 only (9.20 names the same), so that some workspaces may differ"
        )


def run_notes(recorder: Recorder) -> Iterator[str]:
    """Yield notes on what the run assumes: choices that decide a size, comparisons of tokens, memory without a rule."""
    yield from _choice_notes(recorder.values)
    for name, what in recorder.uncounted.items():
        yield f"{name} allocates more on a GPU than is counted: {what}"
    if written := sorted(recorder.mixed.written):
        yield (
            f"computed values are written to tensors in host memory ({', '.join(written)}), where they count "
            "as 0 and True, and as False if they say that something overflows"
        )
    if recorder.too_long_transcript is not None:
        labels, frames = recorder.too_long_transcript
        yield (
            f"a transcript has {labels} labels and its sound {frames} frames, so that the loss of CTC is infinite and "
            "its gradients are no numbers, for which some kernels are quicker (in bf16 up to 11 times): set "
            "data.target_length to what is spoken, about 15 letters or 3.5 word pieces a second"
        )
    yield from _random_notes(recorder.host_draws & recorder.unseeded)
    if recorder.scalar_reads.numbers_differ:
        yield (
            "Python code asks whether computed whole numbers, such as generated tokens, are equal: they are assumed to "
            "differ, so that a loop that waits for a token runs to its limit"
        )


def _random_notes(unseeded: Set[str]) -> Iterator[str]:
    """Yield a note where forward passes take random numbers, and do something else each time, that nobody seeds."""
    if unseeded:
        yield (
            f"what the forward pass computes depends on random numbers of {' and '.join(sorted(unseeded))}, which the "
            "script does not seed: every run differs, in memory and time, and this is one of them"
        )


def _choice_notes(values: Values) -> Iterator[str]:
    """Yield a note where an assumed choice decided the size of something."""
    if "draw" in values.deciding:
        yield (
            "what is computed, or how large some results are, depends on random numbers that the GPU draws; others are "
            "drawn here, so that these sizes differ a little"
        )
    if "choice" in values.deciding:
        yield (
            "how large some results are, such as the rows that each expert gets, depends on values: topk, max, argmax, "
            "multinomial and the like are assumed to pick all entries equally often, so what they pick is spread evenly"
        )


def selection_notes(places: tuple[str, ...]) -> Iterator[str]:
    """Yield a note where operations select by values that do not exist; ``places``: these operations, each once."""
    if not places:
        return
    named = ", ".join(places[:_MAX_PLACES])
    more = f" and {len(places) - _MAX_PLACES} more" if len(places) > _MAX_PLACES else ""
    yield (
        f"what these operations select depends on computed values: {named}{more}; it is assumed to be everything, and "
        "all values to differ: the most that they can return, so memory and time may be lower on a GPU"
    )


def host_memory_notes(host: HostMemory) -> Iterator[str]:
    """Yield a note where autograd saves in host memory."""
    if host.pinned:
        yield (
            f"{human_bytes(host.pinned)} of pinned host memory hold activations, in blocks that PyTorch rounds up to "
            "powers of two"
        )
    if host.pageable:
        yield (
            f"{human_bytes(host.pageable)} of host memory hold activations; it is not pinned, so that copies take "
            "several times as long"
        )


Note = str | Callable[["Workload"], Iterator[str]]
"""A sentence, or what returns sentences on the GPU of a training, which is executed once for several GPUs."""


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
        *_origin_notes(workload),
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
        partial(_precision_notes, dtype=str(weights_dtype(workload, model))),
        *_closure_notes(workload),
        *_sharding_notes(workload),
        _era_notes,
        _machine_notes,
    )


def _origin_notes(workload: Workload) -> Iterator[str]:
    """Yield what the framework does whose configuration was read, where that says nothing."""
    origin = workload.origin
    if origin is not None and origin.assumed:
        yield LeadingNote(f"{origin.name}: {'; '.join(origin.assumed)}")


def _machine_notes(workload: Workload) -> Iterator[str]:
    """Yield what shares the memory of the GPU, which links were not measured, and what a named machine is."""
    gpu, gpus = workload.resolve_gpu(), workload.parallel.gpus
    if gpu.unified_memory:
        yield LeadingNote(
            f"the {gpu.name} has one memory of {human_bytes(gpu.memory_bytes)} for the CPU and the GPU, and only what "
            "the GPU holds is predicted: what the system, the processes and their data loaders hold, and what is "
            "offloaded to host memory, comes off the same budget. Compare with what `free` shows as available"
        )
    links = workload.parallel.links(gpu)
    link = links.within(gpus) if links is not None and gpus > 1 else None
    if link is not None and link.kind == "pcie" and not points_of(link.id) and not points_of(link.like):
        yield (
            f"collectives over {link.name} are predicted at the speed that NCCL counts with; of two machines whose "
            "times were published, one reached half of it from four GPUs on and one a tenth. `trainatomy calibrate "
            f"--gpus {gpus}` measures yours"
        )
    if workload.instance is None:
        return
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
    if workload.train.num_train_epochs is not None and workload.train.max_steps is None and not workload.data.varies:
        yield (
            "train.num_train_epochs has no effect on memory or the time of a step; how long all steps take is said "
            "with train.max_steps, or with the lengths of the samples (data.lengths)"
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
