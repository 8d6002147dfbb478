"""Draw settings at random: ``python benchmarks/settings/draw_settings.py --seed 7 --count 24 > cases/seventh.yaml``.

By default, a third of the trainings are of modules as users write them, a third of decoders with adapters other than
LoRA, frozen parts or a resized vocabulary, a third of models of transformers with unusual settings.  A seed chooses
among them, and chooses optimizer, precision, batch, length, checkpointing, accumulation, loop and allocator; nothing is
left out because it cannot be predicted.  ``--kinds further,model,task`` draws further modules and other tasks of
transformers instead of the first two.
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
FOLDER = "benchmarks/settings"
ADAPTED = (
    *(
        "ia3",
        "vera",
        "prompt_tuning",
        "prompt_encoder",
        "prefix_tuning",
        "adalora",
        "loha",
        "lokr",
        "oft",
        "boft",
        "hra",
    ),
    *("ln_tuning", "fourierft", "miss", "randlora", "road", "trainable_tokens", "vblora", "rslora_all", "dora_saved"),
    *("resized", "half_frozen", "norms_only"),
)
OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop", "adagrad", "sgd", "lion_32bit", "ademamix_8bit"),
    *("paged_ademamix_32bit", "adamw_torch_8bit", "rmsprop_bnb_8bit", "torch.optim.NAdam", "torch.optim.RAdam"),
    *("torch.optim.Adamax", "torch.optim.Adadelta", "torch.optim.ASGD", "torch.optim.Rprop", "torch.optim.Adafactor"),
)
ARGUMENTS = {
    "adamw_torch": ("amsgrad=True", "foreach=False", "maximize=True,foreach=True"),
    "sgd": ("momentum=0.9,nesterov=True", "momentum=0.8,foreach=False"),
    "rmsprop": ("momentum=0.9,centered=True",),
    "torch.optim.NAdam": ("decoupled_weight_decay=True",),
    "torch.optim.Adamax": ("foreach=False",),
    "torch.optim.Adadelta": ("foreach=True",),
}
SMALL = {"hidden_size": 640, "num_hidden_layers": 3, "num_attention_heads": 10, "intermediate_size": 1800}
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {**SMALL, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 20011},
    "Gemma3ForCausalLM": {**SMALL, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 30000},
    "Phi3ForCausalLM": {**SMALL, "num_key_value_heads": 10, "vocab_size": 16001, "pad_token_id": 0, "eos_token_id": 1},
    "GPTNeoXForCausalLM": {**SMALL, "vocab_size": 25003},
    "OPTForCausalLM": {
        **{name: SMALL[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
        "ffn_dim": 1800,
        "word_embed_proj_dim": 640,
        "vocab_size": 20000,
    },
    "BloomForCausalLM": {"hidden_size": 640, "n_layer": 3, "n_head": 10, "vocab_size": 20000},
    "FalconForCausalLM": {"hidden_size": 640, "num_hidden_layers": 3, "num_attention_heads": 10, "vocab_size": 20000},
    "MixtralForCausalLM": {**SMALL, "num_key_value_heads": 5, "num_local_experts": 4, "vocab_size": 15000},
    "DebertaV2ForTokenClassification": {**SMALL, "vocab_size": 20000, "relative_attention": True, "num_labels": 9},
    "ModernBertForMaskedLM": {**SMALL, "vocab_size": 20000, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    "RobertaForSequenceClassification": {**SMALL, "vocab_size": 20000, "max_position_embeddings": 600},
    "ElectraForPreTraining": {**SMALL, "vocab_size": 20000, "embedding_size": 640},
    "T5ForConditionalGeneration": {"d_model": 512, "num_layers": 3, "num_heads": 8, "d_ff": 2048, "vocab_size": 20000},
    "BartForConditionalGeneration": {"d_model": 512, "encoder_layers": 3, "decoder_layers": 3, "vocab_size": 20000},
}
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {**SMALL, "num_labels": 77},
    "Dinov2ForImageClassification": {"hidden_size": 640, "num_hidden_layers": 3, "num_attention_heads": 10},
    "CLIPModel": {},
    "Wav2Vec2ForCTC": {"num_hidden_layers": 3, "vocab_size": 40},
}
SMALL_BERT = {**SMALL, "vocab_size": 20000}
SMALL_MIXTURE = {**SMALL, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 16000, "num_local_experts": 4}
TASKS: dict[str, dict[str, Any]] = {
    "BertForQuestionAnswering": SMALL_BERT,
    "BertForMultipleChoice": SMALL_BERT,
    "BertForPreTraining": SMALL_BERT,
    "AlbertForMaskedLM": {**SMALL_BERT, "embedding_size": 128},
    "MPNetForTokenClassification": SMALL_BERT,
    "XLNetForSequenceClassification": {
        "d_model": 640,
        "n_layer": 2,
        "n_head": 10,
        "d_inner": 1800,
        "vocab_size": 20000,
    },
    "LongformerForSequenceClassification": {**SMALL_BERT, "attention_window": [32, 32, 32]},
    "T5ForQuestionAnswering": {"d_model": 512, "num_layers": 3, "num_heads": 8, "d_ff": 2048, "vocab_size": 20000},
    "PegasusForConditionalGeneration": {"d_model": 512, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 20000},
    "MambaForCausalLM": {"hidden_size": 320, "num_hidden_layers": 2, "vocab_size": 16000},
    "GptOssForCausalLM": {**SMALL_MIXTURE, "intermediate_size": 640},
    "DiffLlamaForCausalLM": {**SMALL, "num_key_value_heads": 10, "vocab_size": 16000},
    "Cohere2ForCausalLM": {**SMALL, "num_key_value_heads": 5, "vocab_size": 16000},
    "Olmo2ForCausalLM": {**SMALL, "num_key_value_heads": 10, "vocab_size": 16000},
    "GPTBigCodeForCausalLM": {"n_embd": 640, "n_layer": 3, "n_head": 10, "vocab_size": 16000},
    "SwinForImageClassification": {"depths": [2, 2], "num_heads": [3, 6], "num_labels": 77},
    "BeitForImageClassification": {**SMALL, "num_labels": 77},
    "ViTMAEForPreTraining": {**SMALL, "decoder_num_hidden_layers": 2},
    "VideoMAEForVideoClassification": {**SMALL, "num_labels": 77},
    "ASTForAudioClassification": {**SMALL, "num_labels": 30},
    "LayoutLMv3ForTokenClassification": {**SMALL_BERT, "num_labels": 9},
    "ViltForQuestionAnswering": {**SMALL_BERT, "num_labels": 99},
    "PatchTSTForPrediction": {"num_hidden_layers": 3, "d_model": 256, "num_attention_heads": 8, "ffn_dim": 512},
    "SiglipModel": {"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 3}},
}
UNTEXTUAL = ("Image", "MAE", "Video", "Audio", "PatchTST", "Siglip", "Layout", "Vilt")
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 12, "use_dora": True, "target_modules": "all-linear"},
    {"r": 20, "use_rslora": True, "lora_dropout": 0.05, "target_modules": "all-linear"},
    {"r": 6, "lora_bias": True, "target_modules": "all-linear", "bias": "all"},
    {"r": 8, "target_modules": "all-linear", "layers_to_transform": [1], "layers_pattern": "layers"},
)


def live(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw a module as users write them, in a plain loop."""
    from live_modules import BATCHES

    name = random.choice(sorted(BATCHES))
    factories = {
        "model": {"factory": f"{FOLDER}/live_modules.py:{name}"},
        "data": {"factory": f"{FOLDER}/live_modules.py:{BATCHES[name]}"},
    }
    batch = random.choice([7, 24, 48, 100])
    return name.lower(), {**factories, "loop": "pytorch", "train": {"per_device_train_batch_size": batch}}


def adapted(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw a decoder with adapters, frozen parts or a resized vocabulary."""
    name = random.choice(ADAPTED)
    batch = {"factory": f"{FOLDER}/adapters.py:{random.choice(['texts', 'long_texts'])}"}
    case: dict[str, Any] = {"model": {"factory": f"{FOLDER}/adapters.py:{name}"}, "data": batch}
    loop = {"loop": "pytorch"} if random.random() < 0.4 else {}
    return name, {**case, **loop, "train": {"per_device_train_batch_size": random.choice([2, 3, 5, 8])}}


def model(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw a model of transformers, its attention, adapters, frozen parts, evaluation and losses."""
    texts = random.random() < 0.8
    models = TEXT_MODELS if texts else OTHER_MODELS
    name = random.choice(sorted(models))
    case: dict[str, Any] = {"model": {"class": name, "config": models[name]}, "train": {}}
    case["train"]["per_device_train_batch_size"] = random.choice([1, 3, 4, 6, 10])
    if texts:
        case["data"] = {"sequence_length": random.choice([33, 129, 250, 301, 480, 511])}
        case["data"] |= random.choice([{}, {"attention_mask": True}, {"padding": True}])
        adapters = random.random() < 0.35 and "CausalLM" in name and "Bloom" not in name
        case["model"] |= {"lora": random.choice(ADAPTERS)} if adapters else {}
        case["model"] |= {"attn_implementation": "eager"} if random.random() < 0.2 else {}
    if "lora" not in case["model"] and random.random() < 0.3:
        case["model"]["freeze"] = random.choice([["*.1.*"], ["*orm*"]])
    if random.random() < 0.3:
        case["train"] |= {"eval_strategy": "steps", "per_device_eval_batch_size": random.choice([2, 9, 16])}
        case["train"] |= random.choice([{"bf16_full_eval": True}, {"fp16_full_eval": True}, {}, {}])
        case.setdefault("data", {}).update(random.choice([{}, {"compute_metrics": True, "eval_samples": 41}]))
        case["train"] |= random.choice(
            [{}, {"include_for_metrics": ["inputs", "loss"]}, {"eval_do_concat_batches": False}]
        )
    elif random.random() < 0.3:
        case["loop"] = "pytorch"
    if "loop" not in case and texts:
        case["train"] |= {"label_smoothing_factor": 0.1} if random.random() < 0.3 else {}
        case["train"] |= {"neftune_noise_alpha": 5.0} if random.random() < 0.2 and "CausalLM" in name else {}
    return name.removesuffix("Model").lower(), case


def further(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw one of the further modules, in a plain loop or with the Trainer."""
    from further_modules import BATCHES

    name = random.choice(sorted(BATCHES))
    case: dict[str, Any] = {
        "model": {"factory": f"{FOLDER}/further_modules.py:{name}"},
        "data": {"factory": f"{FOLDER}/further_modules.py:{BATCHES[name]}"},
    }
    case |= {"loop": "pytorch"} if random.random() < 0.6 else {}
    case["train"] = {"per_device_train_batch_size": random.choice([6, 20, 64, 130])}
    return name.lower(), case


def task(random: Random) -> tuple[str, dict[str, Any]]:
    """Draw another task or family of transformers, with arguments that change what the Trainer does in a step."""
    name = random.choice(sorted(TASKS))
    case: dict[str, Any] = {"model": {"class": name, "config": TASKS[name]}, "train": {}}
    case["train"]["per_device_train_batch_size"] = random.choice([1, 2, 4, 7])
    if not any(part in name for part in UNTEXTUAL):
        case["data"] = {"sequence_length": random.choice([64, 129, 250, 384])}
        case["data"] |= random.choice([{}, {"attention_mask": True}, {"padding": True}])
    if random.random() < 0.25:
        case["loop"] = "pytorch"
        return name.removesuffix("Model").lower(), case
    arguments: tuple[dict[str, Any], ...] = (
        {"include_num_input_tokens_seen": "all"},
        {"average_tokens_across_devices": False},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
        {"weight_decay": 0.1},
        {"eval_strategy": "steps", "per_device_eval_batch_size": 5},
        {"save_strategy": "steps"},
    )
    for each in random.sample(arguments, 2):
        case["train"] |= each
    return name.removesuffix("Model").lower(), case


def with_settings(case: dict[str, Any], kind: str, random: Random) -> dict[str, Any]:
    """Add precision, optimizer, checkpointing, accumulation and the allocator to a case."""
    train = case["train"]
    precision = random.choice(["bf16", "fp16", "fp32", "tf32", "pure"])
    train |= {} if precision in ("fp32", "pure") else {precision: True}
    if precision == "pure" and kind in ("model", "task"):
        case["model"]["dtype"] = random.choice(["bfloat16", "bfloat16", "float16"])
        train |= {"bf16": True} if random.random() < 0.5 and case["model"]["dtype"] == "bfloat16" else {}
    train["optim"] = random.choice(OPTIMIZERS)
    if train["optim"] in ARGUMENTS and random.random() < 0.7:
        train["optim_args"] = random.choice(ARGUMENTS[train["optim"]])
    if kind not in ("live", "further") and random.random() < 0.35:
        train["gradient_checkpointing"] = True
        kwargs: tuple[dict[str, Any], ...] = (
            {"use_reentrant": True},
            {"use_reentrant": False},
            {"use_reentrant": False, "preserve_rng_state": False},
        )
        train |= random.choice([{}, {"gradient_checkpointing_kwargs": random.choice(kwargs)}])
    if random.random() < 0.3:
        train["gradient_accumulation_steps"] = random.choice([2, 3, 5])
    if random.random() < 0.3:
        train["max_grad_norm"] = random.choice([0, 0.5])
    if random.random() < 0.15:
        case["zero_grad_set_to_none"] = False
    if case.get("loop") == "pytorch" and random.random() < 0.2:
        case["ema_decay"] = 0.99
    if "loop" not in case and random.random() < 0.15:
        train["torch_empty_cache_steps"] = 2
    if random.random() < 0.2:
        case["allocator"] = random.choice(
            ["expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4"]
        )
    return case


def main() -> int:
    """Print the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--kinds", default="adapted,live,model", help="of adapted, further, live, model, task")
    options = parser.parse_args()
    drawn = {"live": live, "adapted": adapted, "model": model, "further": further, "task": task}
    kinds = {name: drawn[name] for name in options.kinds.split(",")}
    cases: dict[str, Any] = {}
    number = 0
    while len(cases) < options.count:
        random = Random(f"{options.seed} {number}")
        kind = sorted(kinds)[number % len(kinds)]
        name, case = kinds[kind](random)
        cases.setdefault(f"{name.replace('_', '-')}-{options.seed}", with_settings(case, kind, random))
        number += 1
    yaml.dump(cases, sys.stdout, Dumper=Plain, sort_keys=False, default_flow_style=None, width=150)
    return 0


class Plain(yaml.SafeDumper):
    """Writes what two cases share twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return that nothing is shared."""
        return True


if __name__ == "__main__":
    sys.exit(main())
