"""Draw cases by a seed, so that nobody chooses what is easy: ``python benchmarks/everyday/draw.py --seed 31``.

Prints the cases by kind, as in ``cases/*.yaml``: architecture, size, batch and settings are drawn for each.  The models
are small enough that a case takes some seconds on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from random import Random
from typing import Any

Mapping = dict[str, Any]

DECODERS = ("Llama", "Qwen2", "Qwen3", "Mistral", "GPTNeoX", "OPT", "Phi", "Olmo2", "Gemma2", "Granite")
ENCODERS = ("Bert", "Roberta", "Electra", "DistilBert", "Albert", "MPNet")
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
GROUPED = frozenset({"Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Olmo2", "Granite", "Phi"})


def decoder(draw: Random, task: str = "ForCausalLM", **further: Any) -> Mapping:
    """Draw a decoder of 6 to 14 layers."""
    name = draw.choice(DECODERS if task == "ForCausalLM" else DECODERS[:4])
    width, layers, heads = draw.choice((512, 768, 1024)), draw.randint(6, 14), 8
    config: Mapping = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    inner: Mapping = {"intermediate_size": 3 * width}
    if name == "OPT":
        inner = {"ffn_dim": 4 * width, "word_embed_proj_dim": width}
    config |= {**inner, "vocab_size": draw.choice((8000, 32000))}
    config |= {"num_key_value_heads": draw.choice((2, 4, 8))} if name in GROUPED else {}
    config |= {"head_dim": width // heads} if name in ("Qwen3", "Gemma2") else {}
    config |= {"pad_token_id": 0, "num_labels": 1} if task == "ForSequenceClassification" else {}
    return {"class": f"{name}{task}", "config": config, **further}


def encoder(draw: Random) -> Mapping:
    """Draw an encoder, for texts or for images."""
    if draw.random() < 0.3:
        name = draw.choice(("ViT", "DeiT", "Dinov2", "Swin", "ConvNext"))
        return {"class": f"{name}ForImageClassification"}
    return {"class": f"{draw.choice(ENCODERS)}ForSequenceClassification"}


def lora(draw: Random) -> Mapping:
    """Draw adapters."""
    return {"r": draw.choice((4, 8, 16, 32)), "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def quantised(draw: Random) -> Mapping:
    """Draw a training with quantised weights."""
    quantization = draw.choice(
        (
            {**NF4, "bnb_4bit_use_double_quant": True},
            NF4,
            {"load_in_8bit": True},
            {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"},
        )
    )
    model = decoder(draw, dtype="bfloat16", quantization=quantization, lora=lora(draw))
    train: Mapping = {"per_device_train_batch_size": draw.choice((1, 2, 4, 8)), "bf16": True}
    train |= {"gradient_checkpointing": draw.random() < 0.5}
    train |= {"optim": draw.choice(("paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch"))}
    case: Mapping = {"model": model, "data": {"sequence_length": draw.choice((64, 128, 256, 512))}, "train": train}
    return case | ({"loop": "pytorch"} if draw.random() < 0.3 and "bit" in str(quantization) else {})


def trl(draw: Random) -> Mapping:
    """Draw a training with TRL."""
    loop = draw.choice(("sft", "dpo", "kto", "grpo"))
    model = decoder(draw)
    model |= {"dtype": "bfloat16", "lora": lora(draw)} if draw.random() < 0.4 else {}
    data: Mapping = {"sequence_length": draw.choice((96, 192, 384))}
    data |= {"prompt_length": 40} if loop in ("dpo", "kto") or (loop == "sft" and draw.random() < 0.5) else {}
    case: Mapping = {"loop": loop, "model": model, "data": data}
    case["train"] = {"per_device_train_batch_size": draw.choice((2, 4, 8)) if loop != "grpo" else 4}
    case["train"] |= {} if draw.random() < 0.5 else {"gradient_checkpointing": False}
    if loop == "grpo":
        case["data"]["sequence_length"] = 64
        case["trl"] = {"num_generations": 4, "max_completion_length": draw.choice((12, 24))}
        case["trl"] |= {"num_iterations": 2} if draw.random() < 0.5 else {}
    return case


def evaluation(draw: Random) -> Mapping:
    """Draw a training with an evaluation."""
    model = encoder(draw) if draw.random() < 0.6 else decoder(draw)
    data: Mapping = {} if "Image" in model["class"] else {"sequence_length": draw.choice((64, 128, 256))}
    samples = draw.choice((24, 64, 200))
    data |= {"compute_metrics": True, "eval_samples": samples} if draw.random() < 0.6 else {"eval_samples": samples}
    train: Mapping = {"per_device_train_batch_size": draw.choice((4, 8, 16)), "eval_strategy": "steps"}
    train |= draw.choice(({"bf16": True}, {"fp16": True}, {}))
    train |= {"per_device_eval_batch_size": draw.choice((8, 16, 32))}
    train |= {"eval_accumulation_steps": 2} if "compute_metrics" in data and draw.random() < 0.4 else {}
    return {"model": model, "data": data, "train": train}


def generation(draw: Random) -> Mapping:
    """Draw a call of ``generate()``."""
    settings: Mapping = {"max_new_tokens": draw.choice((16, 32, 48))}
    settings |= draw.choice(({}, {"num_beams": 3}, {"do_sample": True, "top_k": 40, "top_p": 0.9}, {}))
    train: Mapping = {"per_device_train_batch_size": draw.choice((1, 4, 16))}
    model = decoder(draw, dtype=draw.choice(("bfloat16", "float16", "float32")))
    length = {"sequence_length": draw.choice((32, 128, 512))}
    return {"model": model, "data": length, "mode": "generation", "train": train, "generation": settings}


def offloading(draw: Random) -> Mapping:
    """Draw a training whose activations are in host memory."""
    train: Mapping = {"per_device_train_batch_size": draw.choice((4, 8, 16))}
    train |= draw.choice(({"bf16": True}, {"fp16": True}, {}))
    if draw.random() < 0.5:
        kwargs = {"offload": True, **({"use_reentrant": True} if draw.random() < 0.5 else {})}
        model = decoder(draw)
        train |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
        return {"model": model, "data": {"sequence_length": draw.choice((256, 512, 1024))}, "train": train}
    model = encoder(draw)
    data = {} if "Image" in model["class"] else {"sequence_length": draw.choice((128, 256))}
    kind = draw.choice(("pinned", "pinned", "pageable"))
    return {"loop": "pytorch", "model": model, "activation_offloading": kind, "data": data, "train": train}


KINDS: dict[str, tuple[Callable[[Random], Mapping], int]] = {
    "quantised": (quantised, 6),
    "trl": (trl, 5),
    "evaluation": (evaluation, 5),
    "generation": (generation, 4),
    "offloading": (offloading, 4),
}
"""How to draw a case of each kind, and how many."""


def drawn(seed: int, each: int | None = None) -> dict[str, dict[str, Mapping]]:
    """Return the cases of a seed by kind and name; ``each``: how many of each kind, instead of what ``KINDS`` says."""
    found: dict[str, dict[str, Mapping]] = {}
    for kind, (make, count) in KINDS.items():
        draw = Random(f"{seed} {kind}")
        cases = [make(draw) for _ in range(each or count)]
        found[kind] = {name_of(case, kind, number, seed): case for number, case in enumerate(cases)}
    return found


def name_of(case: Mapping, kind: str, number: int, seed: int) -> str:
    """Return the name of a case: its kind, loop and architecture, and the seed."""
    architecture = case["model"]["class"].split("For")[0].lower()
    loop = f"{case['loop']}-" if case.get("loop") not in (None, "pytorch") else ""
    return f"{kind}-{loop}{architecture}-{number}-drawn-{seed}"


def main() -> int:
    """Print the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--each", type=int, help="cases of each kind")
    options = parser.parse_args()
    for kind, cases in drawn(options.seed, options.each).items():
        print(f"# {kind}.yaml")
        for name, case in cases.items():
            print(f"{name}:")
            for key, value in case.items():
                print(f"  {key}: {json.dumps(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
