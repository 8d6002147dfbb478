"""What was predicted in one line: ``BertForMaskedLM · fp32 · AdamW (fused) · SDPA · Trainer · 16 × 512 tokens``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainatomy.reporters.settings import plan_name
from trainatomy.results.plan import Plan
from trainatomy.results.prediction import Prediction
from trainatomy.results.subject import Subject
from trainatomy.units import many, percent

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
_LOOPS = {"trainer": "Trainer", "pytorch": "PyTorch loop", "script": "the script's own loop"} | {
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
        return [f"{low:,} to {high:,} tokens"]
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
