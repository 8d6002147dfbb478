"""Draw trainings as they are set up in practice: ``python benchmarks/settings/draw_practice.py --seed 13 --count 42``.

A third are unusual modules in a plain loop or the Trainer, a third decoders with adapters, quantised weights, packing,
samples of different lengths, TRL's trainers or generation, a third families of transformers in small sizes.  A seed
chooses among them, and their precision, optimizer, attention, checkpointing, accumulation, evaluation and allocator.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from draw_settings import FOLDER, SMALL, Plain  # noqa: E402 - both lie in this folder

OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "ademamix", "lion_32bit"),
    *("adamw_bnb_8bit", "ademamix_8bit", "lion_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_lion_8bit"),
    *("paged_ademamix_8bit", "rmsprop_bnb", "rmsprop_bnb_32bit", "torch.optim.Adam", "torch.optim.RAdam"),
    *("torch.optim.SGD", "torch.optim.Muon"),
)
ROTARY = {**SMALL, "num_key_value_heads": 2, "vocab_size": 16384}
DECODERS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": ROTARY,
    "Qwen2ForCausalLM": ROTARY,
    "Qwen3ForCausalLM": {**ROTARY, "head_dim": 64},
    "MistralForCausalLM": {**ROTARY, "sliding_window": 128},
    "Gemma2ForCausalLM": {**ROTARY, "head_dim": 64},
    "SmolLM3ForCausalLM": {**ROTARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "GraniteForCausalLM": ROTARY,
    "Glm4ForCausalLM": {**ROTARY, "head_dim": 64, "pad_token_id": 0, "eos_token_id": 1},
    "StableLmForCausalLM": ROTARY,
}
SPARSE = {**ROTARY, "head_dim": 64, "moe_intermediate_size": 320, "num_experts_per_tok": 2}
ENCODER = {**SMALL, "vocab_size": 16384}
SEQ2SEQ = {"d_model": 512, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 16384}
FAMILIES: dict[str, tuple[dict[str, Any], int | None]] = {
    "SwitchTransformersForConditionalGeneration": (
        {"d_model": 384, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 6, "vocab_size": 16384},
        192,
    ),
    "NllbMoeForConditionalGeneration": ({**SEQ2SEQ, "num_experts": 8, "encoder_sparse_step": 2}, 200),
    "OpenAIPrivacyFilterForTokenClassification": (
        {**ROTARY, "head_dim": 64, "num_local_experts": 8, "intermediate_size": 320, "num_labels": 9}
        | {"num_experts_per_tok": 2, "pad_token_id": 0, "eos_token_id": 1},
        250,
    ),
    "Qwen3MoeForCausalLM": ({**SPARSE, "num_experts": 8}, 333),
    "OlmoeForCausalLM": ({**ROTARY, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 640}, 300),
    "DeepseekV3ForCausalLM": (
        {**SMALL, "num_key_value_heads": 10, "vocab_size": 16384, "n_routed_experts": 16, "moe_intermediate_size": 320}
        | {"first_k_dense_replace": 1, "q_lora_rank": 256, "kv_lora_rank": 128, "n_group": 4, "topk_group": 2},
        256,
    ),
    "DistilBertForSequenceClassification": (
        {"dim": 640, "n_layers": 3, "n_heads": 10, "hidden_dim": 1800, "vocab_size": 16384},
        320,
    ),
    "FunnelForTokenClassification": ({"d_model": 512, "block_sizes": [2, 2], "vocab_size": 16384}, 256),
    "FNetForMaskedLM": ({**SMALL, "vocab_size": 16384}, 300),
    "NystromformerForSequenceClassification": ({**ENCODER, "segment_means_seq_len": 256}, 256),
    "BigBirdForQuestionAnswering": ({**ENCODER, "attention_type": "original_full"}, 400),
    "RoFormerForMultipleChoice": ({**ENCODER, "embedding_size": 640}, 120),
    "ConvBertForTokenClassification": ({**ENCODER, "embedding_size": 640}, 200),
    "MobileBertForMaskedLM": ({"num_hidden_layers": 4, "vocab_size": 16384}, 128),
    "XLMForSequenceClassification": ({"emb_dim": 640, "n_layers": 3, "n_heads": 10, "n_words": 16384}, 200),
    "BlenderbotForConditionalGeneration": (SEQ2SEQ, 100),
    "LongT5ForConditionalGeneration": ({"d_model": 512, "num_layers": 2, "num_heads": 8, "vocab_size": 16384}, 300),
    "ProphetNetForConditionalGeneration": (
        {"hidden_size": 512, "num_encoder_layers": 2, "num_decoder_layers": 2, "vocab_size": 16384},
        128,
    ),
    "WhisperForConditionalGeneration": (SEQ2SEQ, None),
    "HubertForSequenceClassification": ({"num_hidden_layers": 3}, None),
    "Speech2TextForConditionalGeneration": ({**SEQ2SEQ, "max_source_positions": 3000}, None),
    "SegformerForSemanticSegmentation": ({"num_labels": 21}, None),
    "DeiTForImageClassification": ({**SMALL, "num_labels": 60}, None),
    "Swinv2ForImageClassification": ({"depths": [2, 2], "num_heads": [3, 6], "num_labels": 60}, None),
    "Siglip2ForImageClassification": (
        {"vision_config": {"hidden_size": 640, "num_hidden_layers": 3, "num_attention_heads": 10}},
        None,
    ),
    "DetrForObjectDetection": ({"encoder_layers": 2, "decoder_layers": 2, "num_queries": 50}, None),
    "BlipForConditionalGeneration": (
        {"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 3}},
        40,
    ),
    "TimeSeriesTransformerForPrediction": ({"prediction_length": 24, "d_model": 128}, None),
}
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    {"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1},
    {"r": 64, "use_rslora": True, "target_modules": "all-linear", "lora_dropout": 0.05},
    {"r": 8, "use_dora": True, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"r": 16, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    {"r": 16, "target_modules": "all-linear", "init_lora_weights": "orthogonal"},
    {"r": 8, "target_modules": "all-linear", "rank_pattern": {"q_proj": 32}, "alpha_pattern": {"q_proj": 64}},
    {"r": 8, "target_modules": ["q_proj", "v_proj"], "trainable_token_indices": [0, 5, 9]},
)
QUANTISED: tuple[dict[str, Any], ...] = (
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    | {"bnb_4bit_use_double_quant": True},
    {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "float16"},
    {"load_in_8bit": True},
)
LENGTHS = {"distribution": "lognormal", "mean": 4.6, "sigma": 0.6, "minimum": 12, "maximum": 480, "samples": 160}


def module(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw an unusual module, in a plain loop or with the Trainer."""
    from unusual_modules import BATCHES

    name = random.choice(sorted(BATCHES))
    case: dict[str, Any] = {
        "model": {"factory": f"{FOLDER}/unusual_modules.py:{name}"},
        "data": {"factory": f"{FOLDER}/unusual_modules.py:{BATCHES[name]}"},
        **({"loop": "pytorch"} if random.random() < 0.5 else {}),
        "train": {"per_device_train_batch_size": random.choice([12, 40, 96])},
    }
    precision = random.choice(["bf16", "fp16", "fp32", "tf32"])
    case["train"] |= {} if precision == "fp32" else {precision: True}
    return name.lower(), case


def decoder(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw a decoder: adapters, quantised weights, lengths, packing, a trainer of TRL, or generation."""
    name = random.choice(sorted(DECODERS))
    model: dict[str, Any] = {"class": name, "config": DECODERS[name], "dtype": random.choice(["bfloat16", "float32"])}
    train: dict[str, Any] = {"per_device_train_batch_size": random.choice([2, 3, 4, 8])}
    case: dict[str, Any] = {"model": model, "train": train}
    use = random.choice(["trainer", "trainer", "pytorch", "sft", "sft", "dpo", "reward", "generation"])
    if random.random() < 0.6 and use != "generation":
        model["lora"] = {**random.choice(ADAPTERS), "task_type": "SEQ_CLS" if use == "reward" else "CAUSAL_LM"}
        if random.random() < 0.4 and not model["lora"].get("trainable_token_indices"):
            model["quantization"] = random.choice(QUANTISED)
    if use == "generation":
        model["dtype"] = "bfloat16"
        search: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3}, {"num_return_sequences": 4, "do_sample": True})
        case |= {"mode": "generation", "data": {"sequence_length": random.choice([60, 200])}}
        case["generation"] = {"max_new_tokens": random.choice([24, 40]), **random.choice(search)}
        return f"{name}-generation".lower(), case
    if use not in ("trainer", "pytorch"):
        case["loop"] = use
        if use == "reward":
            model["class"] = name.replace("CausalLM", "SequenceClassification")
            model["config"] = {**DECODERS[name], "num_labels": 1, "pad_token_id": 0}
        case["data"] = {"sequence_length": random.choice([130, 256, 400])}
        case["data"] |= {"prompt_length": 60} if use == "dpo" else {}
        settings: dict[str, tuple[dict[str, Any], ...]] = {
            "sft": ({}, {"packing": True, "max_length": 512}, {"loss_type": "nll", "max_length": 300}),
            "dpo": ({}, {"loss_type": ["sigmoid", "sft"]}, {"precompute_ref_log_probs": True}),
            "reward": ({}, {"center_rewards_coefficient": 0.01}),
        }
        case["trl"] = random.choice(settings[use])
    else:
        case |= {"loop": "pytorch"} if use == "pytorch" else {}
        case["data"] = random.choice(
            [{"sequence_length": 384, "padding": True}, {"sequence_length": 511}, {"lengths": LENGTHS}]
        )
        train |= {"bf16": True} if model["dtype"] == "bfloat16" or random.random() < 0.5 else {}
        model |= random.choice([{}, {}, {"attn_implementation": "eager"}, {"attn_implementation": "flex_attention"}])
        if use == "trainer" and "lengths" in case["data"] and random.random() < 0.5:
            train["train_sampling_strategy"] = "group_by_length"
    return f"{name}-{use}".lower(), case


def family(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw a family of transformers with an evaluation, a precision and a loop."""
    name = random.choice(sorted(FAMILIES))
    config, length = FAMILIES[name]
    train: dict[str, Any] = {"per_device_train_batch_size": random.choice([2, 4, 6])}
    case: dict[str, Any] = {"model": {"class": name, "config": config}, "train": train}
    case |= {"data": {"sequence_length": length}} if length else {}
    precision = random.choice(["bf16", "bf16", "fp16", "fp32", "bfloat16"])
    if precision == "bfloat16":
        case["model"]["dtype"] = precision
    elif precision != "fp32":
        train[precision] = True
    if random.random() < 0.3:
        train |= {"eval_strategy": "steps", "per_device_eval_batch_size": random.choice([3, 16])}
        train |= random.choice([{}, {"eval_accumulation_steps": 1}, {"prediction_loss_only": True}])
    elif random.random() < 0.3:
        case["loop"] = "pytorch"
    return name.lower(), case


def with_settings(case: dict[str, Any], kind: str, random: Random) -> dict[str, Any]:
    """Add an optimizer, checkpointing, accumulation and the allocator to a case."""
    train = case["train"]
    if case.get("mode") == "generation":
        return case
    train["optim"] = random.choice(OPTIMIZERS)
    if kind != "module" and random.random() < 0.4:
        train["gradient_checkpointing"] = random.random() < 0.7
        if train["gradient_checkpointing"]:
            train["gradient_checkpointing_kwargs"] = {"use_reentrant": random.random() < 0.5}
    if random.random() < 0.3:
        train["gradient_accumulation_steps"] = random.choice([2, 4])
    if random.random() < 0.2:
        train["max_grad_norm"] = 0
    if random.random() < 0.2:
        case["allocator"] = random.choice(["expandable_segments:True", "garbage_collection_threshold:0.8"])
    return case


def main() -> int:
    """Print the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=42)
    options = parser.parse_args()
    kinds, cases = (module, decoder, family), dict[str, Any]()
    number = 0
    while len(cases) < options.count:
        random = Random(f"practice {options.seed} {number}")
        kind = kinds[number % len(kinds)]
        name, case = kind(random)
        cases.setdefault(f"{name}-{options.seed}", with_settings(case, kind.__name__, random))
        number += 1
    yaml.dump(cases, sys.stdout, Dumper=Plain, sort_keys=False, default_flow_style=None, width=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
