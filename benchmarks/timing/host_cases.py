"""Draw the small trainings, generations and evaluations of ``host_drawn.py`` by a seed, so that nobody chooses them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Mapping = dict[str, Any]
SEED = 77
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
DECODERS = ("Llama", "Qwen2", "Qwen3", "Mistral", "GPTNeoX", "OPT", "Phi", "Olmo2", "Gemma2", "Granite")
OTHERS = ("GPT2", "GPTNeo", "StableLm", "Cohere")
GROUPED = frozenset({"Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Olmo2", "Granite", "Phi", "StableLm", "Cohere"})
ENCODERS = ("Bert", "Roberta", "Electra", "DistilBert", "MPNet", "Albert", "ViT", "DeiT", "Dinov2")
WINDOWS = ("Swin", "Swinv2", "Data2VecVision", "BigBird", "Beit", "Longformer")


def decoder(draw: Random, most: int = 8, **further: Any) -> Mapping:
    """Draw a decoder."""
    name = draw.choice((*DECODERS, *OTHERS))
    width, layers = draw.choice((64, 128, 256)), draw.randint(2, most)
    vocabulary = draw.choice((2000, 8000))
    config: Mapping
    if name == "GPT2":
        config = {"n_embd": width, "n_layer": layers, "n_head": 4, "vocab_size": vocabulary}
        return {"class": "GPT2LMHeadModel", "config": config, **further}
    if name == "GPTNeo":
        config = {"hidden_size": width, "num_heads": 4, "vocab_size": vocabulary, "num_layers": layers}
        config["attention_types"] = [[["global"], layers]]
        return {"class": "GPTNeoForCausalLM", "config": config, **further}
    config = {"hidden_size": width, "num_attention_heads": 4, "vocab_size": vocabulary, "num_hidden_layers": layers}
    inner = {"ffn_dim": 2 * width, "word_embed_proj_dim": width}
    config |= inner if name == "OPT" else {"intermediate_size": 2 * width}
    config |= {"num_key_value_heads": draw.choice((2, 4))} if name in GROUPED else {}
    config |= {"head_dim": width // 4} if name in ("Qwen3", "Gemma2") else {}
    config |= {"pad_token_id": 0} if name in ("Cohere", "StableLm", "Phi") else {}
    return {"class": f"{name}ForCausalLM", "config": config, **further}


def encoder(draw: Random) -> Mapping:
    """Draw an encoder, for texts or for images."""
    name, width, layers = draw.choice(ENCODERS), draw.choice((64, 128, 256)), draw.randint(2, 8)
    config: Mapping = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
    config |= {} if name == "Dinov2" else {"intermediate_size": 2 * width}
    if name == "DistilBert":
        config = {"dim": width, "n_layers": layers, "n_heads": 4, "hidden_dim": 2 * width}
    if name in ("ViT", "DeiT", "Dinov2"):
        return {"class": f"{name}ForImageClassification", "config": {**config, "image_size": 64}}
    config |= {"vocab_size": 2000}
    config |= {"embedding_size": 64} if name in ("Electra", "Albert") else {}
    return {"class": f"{name}ForSequenceClassification", "config": config}


def window(draw: Random) -> Mapping:
    """Draw a network whose attention has windows, blocks or relative positions."""
    name = draw.choice(WINDOWS)
    if name in ("Swin", "Swinv2"):
        depths = [draw.choice((2, 4)) for _ in range(draw.choice((2, 3, 4)))]
        config: Mapping = {"image_size": 64, "embed_dim": 32, "depths": depths}
        config["num_heads"] = [2**place for place in range(len(depths))]
        config["window_size"] = 2 if len(depths) == 4 else draw.choice((2, 4))
        return {"class": f"{name}ForImageClassification", "config": config}
    width, layers = draw.choice((64, 128, 256)), draw.randint(2, 6)
    config = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4}
    config["intermediate_size"] = 2 * width
    if name in ("Data2VecVision", "Beit"):
        config |= {"image_size": 64, "use_relative_position_bias": draw.random() < 0.5}
        return {"class": f"{name}ForImageClassification", "config": config}
    config |= {"vocab_size": 2000, "max_position_embeddings": 1024}
    config |= {"block_size": 16} if name == "BigBird" else {"attention_window": 32}
    return {"class": f"{name}ForSequenceClassification", "config": config}


def precision(draw: Random) -> Mapping:
    """Draw autocast or none."""
    return draw.choice(({"bf16": True}, {"fp16": True}, {}, {"bf16": True}))


def length_of(model: Mapping, draw: Random) -> Mapping:
    """Draw the length of texts; images have none."""
    if "Image" in model["class"]:
        return {}
    return {"sequence_length": 512 if "BigBird" in model["class"] else draw.choice((16, 32, 64))}


def batch(draw: Random, *sizes: int) -> Mapping:
    """Draw the batch size."""
    return {"per_device_train_batch_size": draw.choice(sizes or (1, 2, 4))}


def generation(draw: Random) -> Mapping:
    """Draw a call of ``generate()``."""
    sampled = {"do_sample": True, "top_k": 40}
    further = {**sampled, "top_p": 0.9, "temperature": 0.7}
    settings: Mapping = {"max_new_tokens": draw.choice((12, 16, 20))}
    kinds: tuple[Mapping, ...] = ({}, {}, {"num_beams": 3}, sampled, further)
    settings |= draw.choice((*kinds, {"repetition_penalty": 1.2}, {"use_cache": False}))
    model = decoder(draw, 10, dtype=draw.choice(("bfloat16", "float16", "float32")))
    data = {"sequence_length": draw.choice((16, 64, 128))}
    train = batch(draw, 1, 2, 4, 8)
    return {"mode": "generation", "model": model, "data": data, "train": train, "generation": settings}


def checkpointing(draw: Random) -> Mapping:
    """Draw a training with checkpoints, some of them in host memory."""
    model = draw.choice((decoder, encoder))(draw)
    while "MPNet" in model["class"]:  # it has no checkpoints
        model = encoder(draw)
    reentrant = {"use_reentrant": True}
    kwargs: Mapping = draw.choice(({}, reentrant, {"offload": True}, {**reentrant, "offload": True}))
    train = {**batch(draw), **precision(draw), "gradient_checkpointing": True}
    train |= {"gradient_checkpointing_kwargs": kwargs} if kwargs else {}
    return {"model": model, "data": length_of(model, draw), "train": train, **plain_loop(draw)}


def plain_loop(draw: Random) -> Mapping:
    """Draw the plain loop rather than the Trainer."""
    return {"loop": "pytorch"} if draw.random() < 0.4 else {}


def offloading(draw: Random) -> Mapping:
    """Draw a training whose activations are in host memory."""
    model = draw.choice((decoder, encoder))(draw)
    case: Mapping = {"loop": "pytorch", "model": model}
    case["activation_offloading"] = draw.choice(("pinned", "pinned", "pageable"))
    return {**case, "data": length_of(model, draw), "train": {**batch(draw), **precision(draw)}}


def windows(draw: Random) -> Mapping:
    """Draw a training of ``window``."""
    model = window(draw)
    data, train = length_of(model, draw), {**batch(draw, 1, 2), **precision(draw)}
    return {"model": model, "data": data, "train": train, **plain_loop(draw)}


def evaluation(draw: Random) -> Mapping:
    """Draw a training with evaluations."""
    model = draw.choice((decoder, encoder, window))(draw)
    data = {**length_of(model, draw), "eval_samples": draw.choice((16, 32, 64))}
    data |= {"compute_metrics": True} if draw.random() < 0.5 else {}
    train = {**batch(draw), **precision(draw), "eval_strategy": "steps"}
    train["per_device_eval_batch_size"] = draw.choice((4, 8, 16))
    return {"model": model, "data": data, "train": train}


def plain(draw: Random) -> Mapping:
    """Draw a training with an optimizer, accumulation or adapters."""
    model = draw.choice((decoder, encoder))(draw)
    data, train = length_of(model, draw), {**batch(draw), **precision(draw)}
    case = {"model": model, "data": data, "train": train}
    eight_bit, paged = {"optim": "adamw_bnb_8bit"}, {"optim": "paged_adamw_8bit"}
    train |= draw.choice(({}, eight_bit, paged, {"gradient_accumulation_steps": 2}, {}))
    adapts = draw.random() < 0.3 and "Causal" in model["class"]
    model |= {"lora": {"r": 4, "target_modules": "all-linear"}} if adapts else {}
    return case if "lora" in model or draw.random() < 0.6 else {**case, "loop": "pytorch"}


def quantised(draw: Random) -> Mapping:
    """Draw a training with 4-bit weights."""
    weights = {**NF4, "bnb_4bit_use_double_quant": draw.random() < 0.5}
    lora = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = decoder(draw, 6, dtype="bfloat16", quantization=weights, lora=lora)
    data, train = length_of(model, draw), {**batch(draw), "bf16": True}
    train["gradient_checkpointing"] = draw.random() < 0.5
    return {"model": model, "data": data, "train": train}


KINDS: dict[str, tuple[Callable[[Random], Mapping], int]] = {
    "generation": (generation, 16),
    "checkpointing": (checkpointing, 10),
    "evaluation": (evaluation, 10),
    "offloading": (offloading, 6),
    "windows": (windows, 8),
    "plain": (plain, 8),
    "quantised": (quantised, 4),
}
"""How to draw a case of each kind, and how many."""


def cases() -> list[tuple[str, Mapping]]:
    """Return the names and mappings of all cases; kinds take turns, so that a time limit cuts all of them."""
    drawn = [
        ((number + 0.5) / count, f"{kind}.{number}", make(Random(f"{SEED} {kind} {number}")))
        for kind, (make, count) in KINDS.items()
        for number in range(count)
    ]
    return [(name, mapping) for _, name, mapping in sorted(drawn, key=lambda one: one[:2])]
