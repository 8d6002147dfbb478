"""What was predicted in one line: ``BertForMaskedLM · fp32 · AdamW (fused) · SDPA · Trainer · 16 × 512 tokens``.

Sentences about evaluation, checkpoints, experts, generation and samples of different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainatomy.reporters.settings import plan_name
from trainatomy.results.lengths import SAMPLING_RATE, FullestBatch, LengthsPrediction, Unit
from trainatomy.results.prediction import Plan, Prediction, Subject
from trainatomy.results.tasks import Checkpoint, Evaluation, Experts, Generation, RestoredCheckpoint
from trainatomy.units import by, count_of, human_bytes, many, percent, rate, seconds

SEPARATOR = " · "

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
_QUANTIZATION = {
    "nf4": "4-bit NF4 weights",
    "fp4": "4-bit FP4 weights",
    "int8": "8-bit weights (LLM.int8)",
    "Int8WeightOnlyConfig": "8-bit weights (torchao)",
    "Float8WeightOnlyConfig": "float8 weights (torchao)",
}
_ATTENTION = {
    "eager": "eager attention",
    "sdpa": "SDPA",
    "flash_attention_2": "FlashAttention 2",
    "flex_attention": "FlexAttention",
}
_KERNELS = {"flash": "flash", "efficient": "memory-efficient", "cudnn": "cuDNN"}
_LOOPS = {
    "trainer": "Trainer",
    "pytorch": "PyTorch loop",
    "preference": "trainer on preferences",
    "script": "the script's own loop",
} | {
    name: f"TRL's {title}Trainer"
    for name, title in {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}.items()
}
_OPTIMIZERS = {
    "adamw_torch": "AdamW (foreach)",
    "adamw_torch_fused": "AdamW (fused)",
    "adamw_8bit": "8-bit AdamW (bitsandbytes)",
    "trainatomy.training.adamw_hf.AdamW": "AdamW of transformers 4",
}
_BASES = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "radam": "RAdam",
    "ademamix": "AdEMAMix",
    "adalomo": "AdaLomo",
    "lomo": "LOMO",
    "grokadamw": "GrokAdamW",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "lion": "Lion",
}
_LIBRARIES = {"bnb": "bitsandbytes", "torch": "", "galore": "GaLore", "apollo": "APOLLO"}
_SIDES = 2
"""Last dimensions of an image that are its height and width."""


def subject_line(prediction: Prediction) -> str:
    """Return what was predicted; empty for a prediction that an earlier version recorded."""
    return SEPARATOR.join(subject_parts(prediction).values())


def shared_subject(predictions: Sequence[Prediction]) -> str:
    """Return what several predictions have in common."""
    first, *others = [subject_parts(each) for each in predictions] or [{}]
    shared = (text for name, text in first.items() if all(each.get(name) == text for each in others))
    return SEPARATOR.join(shared)


def subject_parts(prediction: Prediction) -> dict[str, str]:
    """Return what was predicted, by aspect; aspects that say nothing are left out."""
    subject = prediction.subject
    if subject is None:
        return {}
    plan = Plan.of(prediction.workload)
    parts = {
        "model": " + ".join(subject.models),
        "adapters": _trained(subject),
        "precision": _precision(subject),
        "optimizer": "" if subject.optimizer is None else optimizer_name(subject.optimizer),
        "attention": _attention(subject),
        "checkpointing": _checkpointing(subject.checkpointing),
        "compiled": "compiled" if subject.compiled else "",
        "gradients": "gradients kept between steps" if subject.keeps_gradients else "",
        "loop": _LOOPS.get(subject.loop, subject.loop) if subject.mode == "training" else subject.mode,
        "plan": plan_name(plan) if plan.world_size > 1 else "",
        "batch": _batch(subject),
        "software": _software(subject),
    }
    return {name: text for name, text in parts.items() if text}


def optimizer_name(optimizer: str) -> str:
    """Return the name of an optimizer as people write it: ``AdamW (fused)``, ``paged 8-bit AdamW (bitsandbytes)``."""
    if optimizer in _OPTIMIZERS:
        return _OPTIMIZERS[optimizer]
    if "." in optimizer or ":" in optimizer or not optimizer.islower():  # classes
        return optimizer.replace(":", ".").rpartition(".")[2]
    words, base, library = [], optimizer, ""
    for part in optimizer.split("_"):
        if part in _BASES:
            base = _BASES[part]
        elif part in _LIBRARIES:
            library = library or _LIBRARIES[part]
        else:
            words.append(part.replace("8bit", "8-bit").replace("4bit", "4-bit").replace("32bit", "32-bit"))
    name = " ".join([*words, base]).replace("schedule free", "schedule-free")
    return f"{name} ({library})" if library else name


def _trained(subject: Subject) -> str:
    if subject.lora_rank is not None:
        return f"LoRA r {subject.lora_rank}"
    if subject.trained_share is None:
        return ""
    return f"{percent(subject.trained_share, 1)} of the parameters trained"


def _precision(subject: Subject) -> str:
    weights = _DTYPES.get(subject.weights_dtype, subject.weights_dtype)
    if subject.quantization is not None:
        kept = _QUANTIZATION.get(subject.quantization, f"{subject.quantization} weights")
        return f"{kept}, {subject.autocast} autocast" if subject.autocast else f"{kept}, {weights} beside them"
    if subject.autocast is not None:
        return f"{subject.autocast} autocast over {weights} weights"
    if weights != "fp32":
        return f"{weights} weights"
    return "fp32 (products in TF32)" if subject.tf32 else "fp32"


def _attention(subject: Subject) -> str:
    name = subject.attention or ("sdpa" if subject.attention_kernels else "")
    kernels = ", ".join(_KERNELS[each] for each in subject.attention_kernels)
    text = _ATTENTION.get(name, name)
    return f"{text} ({kernels})" if kernels and name == "sdpa" else text


def _checkpointing(every: int) -> str:
    return f"gradient checkpointing of every {every} layers" if every > 1 else "gradient checkpointing" if every else ""


def _batch(subject: Subject) -> str:
    """Return ``16 × 512 tokens``, ``32 images of 224 × 224``, ``4 × 2,048 tokens × 8 accumulation steps``."""
    sizes = _sizes(subject)
    text = f"{subject.batch_size:,} × {' + '.join(sizes)}" if sizes else f"batch {subject.batch_size:,}"
    if subject.new_tokens is not None:
        text += f" + {subject.new_tokens:,} new" + (f", {subject.beams} beams" if subject.beams > 1 else "")
    steps = subject.accumulation_steps
    return f"{text} × {steps:,} accumulation steps" if steps > 1 else text


def _sizes(subject: Subject) -> list[str]:
    """Return the size of each input of a sample in words."""
    if subject.lengths is not None:
        low, high = subject.lengths
        if isinstance(low, int):
            return [f"{low:,} to {high:,} tokens"]
        return [f"{low} to {high} of audio" if low.endswith("s") else f"images of {low} to {high}"]
    shapes = subject.inputs
    known = {
        "input_ids": _tokens(shapes),
        "pixel_values": _image(shapes.get("pixel_values", ())),
        "input_features": _frames(shapes.get("input_features", ())),
        "input_values": _sound(shapes.get("input_values", ())),
    }
    found = [text for name, text in known.items() if name in shapes and text]
    if found or not shapes:
        return found
    return [" × ".join(f"{size:,}" for size in next(iter(shapes.values()))) or "1 value"]


def _tokens(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the tokens of a text, and of the text that a decoder writes where it has another length."""
    read = " × ".join(f"{size:,}" for size in shapes.get("input_ids", ()))
    written = shapes.get("decoder_input_ids", shapes.get("labels", ()))
    differs = len(written) == 1 and len(shapes.get("input_ids", ())) == 1 and written != shapes["input_ids"]
    return f"{read} → {written[0]:,} tokens" if differs else f"{read} tokens"


def _image(shape: tuple[int, ...]) -> str:
    """Return an image, or several, or the patches that stand for them: ``images of 224 × 224``."""
    if len(shape) <= _SIDES:
        return f"{shape[0]:,} image patches" if len(shape) == _SIDES else ""
    height, width = shape[-_SIDES:]
    count = shape[0] if len(shape) > _SIDES + 1 else 1
    return f"{many(count, 'image')} of {height} × {width}"


def _frames(shape: tuple[int, ...]) -> str:
    return f"{shape[-1]:,} audio frames" if shape else ""


def _sound(shape: tuple[int, ...]) -> str:
    return f"{shape[-1]:,} audio samples" if shape else ""


def _software(subject: Subject) -> str:
    """Return the software that is emulated instead of the installed one."""
    era = f"libraries of {subject.era}" if subject.era else ""
    torch = f"PyTorch {subject.torch}" if subject.torch else ""
    return ", ".join(filter(None, (era, torch)))


def evaluation(found: Evaluation) -> list[str]:
    """Return which phase peaks, and what an evaluation costs in memory and time."""
    batches = f"{found.batches:,} batch{'' if found.batches == 1 else 'es'} of {found.batch_size}"
    count = f"{many(found.samples, 'sample')} in {batches}"
    own, before = found.own_allocated_bytes, found.allocated_before_bytes
    spent = "" if found.seconds is None else f", {seconds(found.seconds)}"
    if found.first_extra_seconds:
        spent += f" (the first one {seconds(found.first_extra_seconds)} longer"
        if found.first_on_machine_seconds:
            spent += f", and {seconds(found.first_on_machine_seconds)} more if it is the first on its machine"
        spent += ")"
    lines = [f"one evaluation: {count}{spent}"]
    if own is not None:
        peaks = "the evaluation" if own > before else "the training step"
        lines.append(
            f"{peaks} has the peak: {human_bytes(before)} allocated until the evaluation, {human_bytes(own)} in it"
        )
    reserved, after = human_bytes(found.reserved_before_bytes), human_bytes(found.reserved_after_bytes)
    more = found.added_reserved_bytes
    kept = f" ({human_bytes(more)} more, which stay reserved)" if more else ""
    return [*lines, f"{reserved} reserved before it, {after} after it{kept}"]


def checkpoint(found: Checkpoint) -> list[str]:
    """Return what a checkpoint takes on disk, and whether saving it raises the peak."""
    weights, states = found.weights_bytes, found.states_bytes
    others = found.total_bytes - weights - states
    parts = [f"{human_bytes(weights)} of weights"]
    parts += [f"{human_bytes(states)} of optimizer states"] if states else []
    parts += [f"{human_bytes(others)} of other files"]
    by = " by this GPU, as each writes its own part" if found.is_sharded else ""
    lines = [f"{human_bytes(found.total_bytes)} on disk{by}: {', '.join(parts)}"]
    if found.kept is None:
        lines.append("every checkpoint is kept; save_total_limit removes older ones")
    else:
        size = human_bytes(found.total_bytes * (found.kept + 1))
        lines.append(f"{size} on disk while {many(found.kept, 'checkpoint')} and a new one exist")
    more = found.allocated_after_bytes - found.allocated_before_bytes
    raised = f"saving raises the peak of GPU memory by {human_bytes(more)}" if more > 0 else "saving raises no peak"
    lines.append(f"{raised}{'' if more > 0 else ' of GPU memory'}")
    if found.host_bytes is not None:
        lines.append(f"{human_bytes(found.host_bytes)} of host memory while it is saved")
    return lines


def checkpoints(saved: Checkpoint | None, loaded: Sequence[RestoredCheckpoint]) -> list[str]:
    """Return what the checkpoints of a training take that are saved and loaded."""
    return [*([] if saved is None else checkpoint(saved)), *map(restored, loaded)]


def restored(found: RestoredCheckpoint) -> str:
    """Return what loading a checkpoint takes of the GPU and of the host."""
    more = found.allocated_after_bytes - found.allocated_before_bytes
    if found.purpose == "resume":
        gpu = f"resuming: {human_bytes(found.allocated_after_bytes)} allocated on the GPU before the first step"
    else:
        raised = f"raises the peak of GPU memory by {human_bytes(more)}" if more > 0 else "raises no peak of GPU memory"
        gpu = f"loading the best model after the training {raised}"
    host = "" if found.host_bytes is None else f"; the host reads up to {human_bytes(found.host_bytes)} at once"
    return gpu + host


def experts(found: Experts) -> list[str]:
    """Return what a mixture of experts holds against what it computes with, and how rows are assumed to be spread."""
    active, held = count_of(found.active_parameters), count_of(found.parameters)
    share = percent(found.active_parameters, found.parameters)
    lines = [
        f"{held} parameters in memory, of which {active} ({share}) compute for each token: "
        f"{found.experts_per_token} of {found.experts} experts in {many(found.layers, 'layer')}",
        f"experts hold {count_of(found.expert_parameters)} of them "
        f"({percent(found.expert_parameters, found.parameters)}); weights, gradients and optimizer states are held for "
        "all experts, whether a token passes them or not",
    ]
    if found.rows_per_expert is None:
        return lines
    return [
        *lines,
        f"assumed: the router spreads rows evenly, {found.rows_per_expert:,.0f} of a batch for each expert; on one GPU "
        "an uneven spread changes neither memory nor arithmetic, only how well the rows fill the kernels' tiles",
    ]


def generation(found: Generation) -> list[str]:
    """Return what keys and values take, and the time to the first and to each further token."""
    lines = [
        f"{many(found.sequences, 'sequence')} of {many(found.prompts, 'prompt')}, "
        f"{many(found.new_tokens, 'new token')} each; none ends early",
        f"keys and values: {human_bytes(found.cache_bytes)} at the end, {human_bytes(found.cache_bytes_per_token)} per "
        "token of each sequence",
    ]
    if found.first_token_seconds is None:
        return lines
    rest = "" if found.token_seconds is None else f", {seconds(found.token_seconds)} for each further one"
    return [*lines, f"{seconds(found.first_token_seconds)} to the first token{rest}"]


_BATCHING = {
    "padded": "padded to the longest of a batch",
    "padded to the maximum": "padded to sequence_length",
    "packed": "joined and cut into packs of sequence_length",
    "joined": "joined in one row per batch, without padding",
}


class _Counted(NamedTuple):
    """How a unit of length is shown: what many are called, how many counts are one, and its decimals."""

    name: str
    per: int = 1
    decimals: int = 0

    def shown(self, length: float) -> str:
        """Return a length in this unit."""
        return f"{length / self.per:,.{self.decimals}f}"


_OF_UNIT = {
    "tokens": _Counted("tokens"),
    "audio samples": _Counted("seconds of audio", SAMPLING_RATE, 1),
    "pixels": _Counted("megapixels", 10**6, 2),
}


def samples_of_lengths(lengths: LengthsPrediction) -> str:
    """Return ``2,000 samples of 12 to 512 tokens (mean 176), padded to the longest of a batch: 250 steps an epoch``."""
    samples, of = lengths.samples, _OF_UNIT[lengths.samples.unit]
    return (
        f"{many(samples.count, 'sample')} of {of.shown(samples.shortest)} to {of.shown(samples.longest)} {of.name} "
        f"(mean {of.shown(samples.mean)}), {_BATCHING[lengths.batching]}: {many(lengths.steps, 'step')} an epoch"
    )


def worst_order(lengths: LengthsPrediction) -> str:
    """Return which order the memory breakdown is of, and what was replayed."""
    replayed = ""
    if lengths.is_sampled:
        count = min(len(order.steps) for order in lengths.orders)
        replayed = (
            f" Of each epoch about {count:,} steps were replayed: the first ones, and those that bring a longer batch "
            "than any before."
        )
    fitting, ranks = sum(order.fits for order in lengths.orders), len({order.rank for order in lengths.orders})
    found = many(len({order.seed for order in lengths.orders}), "order")
    found += f" of {ranks} ranks" if ranks > 1 else ""
    orders = f"{found}, {lengths.sampling}" + ("" if fitting == len(lengths.orders) else f" ({fitting} of them fit)")
    worst = f"seed {lengths.worst_seed}" + (f", rank {lengths.worst_rank}" if ranks > 1 else "")
    return f"{orders}; memory above is that of the worst, {worst}.{replayed}"


_MOST_SAMPLES = 8
"""Samples of a batch that are listed."""


def fullest_batch(batch: FullestBatch, unit: Unit = "tokens") -> str:
    """Return which batch of the worst order is the fullest, and what to do with it."""
    of, what, fewer = _OF_UNIT[unit], "samples", "shorter"
    every, rows = [of.shown(length) for length in batch.samples], f"{many(batch.rows, 'row')} of "
    rows += many(batch.row_tokens, "token") if unit == "tokens" else f"{of.shown(batch.row_tokens)} {of.name}"
    if batch.images:
        every, what, fewer = [by(size) for size in batch.images], "images", "smaller"
    if batch.image_size is not None:
        rows = f"{many(batch.rows, 'image')} padded to {by(batch.image_size)}"
    shown = ", ".join(every[:_MOST_SAMPLES])
    more = f" and {len(every) - _MOST_SAMPLES} {fewer} ones" if len(every) > _MOST_SAMPLES else ""
    return (
        f"The fullest batch of that order has {rows} ({what} of {shown}{more}), in step {batch.step + 1:,}. To see "
        "early whether the training fits, put it into the second step: in the first there are no optimizer states yet."
    )


def padding_of_lengths(lengths: LengthsPrediction) -> str:
    """Return the tokens of a step, how many are padding, and the tokens per second."""
    of = _OF_UNIT[lengths.samples.unit]
    text = (
        f"{of.shown(lengths.tokens_per_step)} {of.name} of samples in a step of "
        f"{of.shown(lengths.padded_tokens_per_step)}: {percent(lengths.padding_share, 1)} is padding"
    )
    if lengths.waiting_share:
        text += f"; ranks wait {percent(lengths.waiting_share, 1)} of the time for the one with the longest batch"
    if lengths.tokens_per_second is None or lengths.padded_tokens_per_second is None:
        return text
    samples, padded = (rate(each / of.per) for each in (lengths.tokens_per_second, lengths.padded_tokens_per_second))
    return f"{text}; {samples} {of.name}/s of samples, {padded} with padding"


def new_lengths(lengths: LengthsPrediction) -> str | None:
    """Return what lengths that occur for the first time cost, None if they cost nothing."""
    extra, count = lengths.new_shape_seconds, lengths.new_shapes
    if not extra or count is None:
        return None
    is_text = lengths.samples.unit == "tokens"
    what, fewer = ("attention", " pad_to_multiple_of makes them fewer.") if is_text else ("convolutions", "")
    return (
        f"A step takes about {seconds(extra)} longer when its length has not occurred before, because cuDNN plans its "
        f"{what} for it: {count:,.0f} lengths in an epoch of {lengths.steps:,} steps, {seconds(extra * count)}, "
        f"which the step time leaves out.{fewer} On a machine where no such training has "
        "run before, CUDA also compiles a few of cuDNN's kernels, 1 to 3 s each, and keeps them in ~/.nv/ComputeCache."
    )
