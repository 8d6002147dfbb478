"""Decoders with adapters of peft other than LoRA, each built by a function without arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, WIDTH, LAYERS = 12000, 512, 4
TARGETS = ["q_proj", "v_proj", "down_proj"]


def decoder(dtype: torch.dtype = torch.float32) -> Any:
    """Build a decoder of 40 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def texts(batch_size: int) -> dict[str, Tensor]:
    """Return a batch of 201 tokens a sample, which are their own labels."""
    tokens = torch.randint(0, VOCABULARY, (batch_size, 201), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def long_texts(batch_size: int) -> dict[str, Tensor]:
    """Return a batch of 730 tokens a sample, which are their own labels."""
    tokens = torch.randint(0, VOCABULARY, (batch_size, 730), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=64, target_modules=["q_proj", "o_proj"]),
    "prompt_tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=13),
    "prompt_encoder": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=10, encoder_hidden_size=128
    ),
    "prefix_tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=17),
    "adalora": lambda: peft.AdaLoraConfig(task_type="CAUSAL_LM", init_r=12, target_modules=TARGETS, total_step=1000),
    "loha": lambda: peft.LoHaConfig(r=8, target_modules=TARGETS),
    "lokr": lambda: peft.LoKrConfig(r=8, target_modules=TARGETS),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=32, target_modules=TARGETS),
    "boft": lambda: peft.BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=1, target_modules=["q_proj", "v_proj"]),
    "hra": lambda: peft.HRAConfig(r=8, target_modules=TARGETS),
    "ln_tuning": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=500, target_modules=["q_proj", "v_proj"]),
    "miss": lambda: peft.MissConfig(r=64, target_modules=TARGETS),
    "randlora": lambda: peft.RandLoraConfig(r=16, target_modules=["q_proj", "o_proj"]),
    "road": lambda: peft.RoadConfig(target_modules=TARGETS),
    "trainable_tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5, 999], target_modules=["embed_tokens"]),
    "vblora": lambda: peft.VBLoRAConfig(r=4, num_vectors=60, vector_length=256, target_modules=["q_proj"]),
    "rslora_all": lambda: peft.LoraConfig(r=24, use_rslora=True, target_modules="all-linear"),
    "dora_saved": lambda: peft.LoraConfig(
        r=8, use_dora=True, target_modules=TARGETS, modules_to_save=["lm_head"], lora_dropout=0.1
    ),
}


def _adapted(method: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: nn.Module = peft.get_peft_model(decoder(), CONFIGURATIONS[method]())
        return model

    return build


ia3 = _adapted("ia3")
vera = _adapted("vera")
prompt_tuning = _adapted("prompt_tuning")
prompt_encoder = _adapted("prompt_encoder")
prefix_tuning = _adapted("prefix_tuning")
adalora = _adapted("adalora")
loha = _adapted("loha")
lokr = _adapted("lokr")
oft = _adapted("oft")
boft = _adapted("boft")
hra = _adapted("hra")
ln_tuning = _adapted("ln_tuning")
fourierft = _adapted("fourierft")
miss = _adapted("miss")
randlora = _adapted("randlora")
road = _adapted("road")
trainable_tokens = _adapted("trainable_tokens")
vblora = _adapted("vblora")
rslora_all = _adapted("rslora_all")
dora_saved = _adapted("dora_saved")


def resized() -> nn.Module:
    """Build the decoder with a vocabulary that grew to a multiple of 64, with tied embeddings."""
    model = decoder()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.resize_token_embeddings(VOCABULARY + 77, pad_to_multiple_of=64)
    return model


def half_frozen() -> nn.Module:
    """Build the decoder with its embeddings and first two layers frozen, in bfloat16."""
    model = decoder(torch.bfloat16)
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    return model


def norms_only() -> nn.Module:
    """Build the decoder with its norms and its output layer trained only."""
    model = decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "lm_head" in name)
    return model
