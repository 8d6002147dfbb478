"""Draw trainings for ``trainings.yaml``: model, precision and batch by a seed, so that nobody chooses what is easy.

``python benchmarks/timing/drawn_trainings.py [--seed 24] [--count 32] [--of usual]`` prints rows of
``trainings.yaml``.  Each family gives as many trainings as its share of ``CANDIDATES``; a candidate is drawn once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from random import Random
from typing import Any

UNNUMBERED = (24, 25)
"""Seeds that the names of their trainings do not say."""
PRECISIONS = ("fp32", "tf32", "bf16", "bf16", "fp16")
FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Multiples of a candidate's batch."""


def _hub(name: str, kind: str, **config: Any) -> dict[str, Any]:
    return {"of": "transformers", "model": {"id": name, "class": kind, **({"config": config} if config else {})}}


def _class(kind: str, **config: Any) -> dict[str, Any]:
    return {"of": "transformers", "model": {"class": kind, "config": config}}


_LORA = {"lora": {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}}
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


def _quantised(kind: str, quantization: dict[str, Any], **config: Any) -> dict[str, Any]:
    model = {"class": kind, "config": config, "dtype": "bfloat16", "quantization": quantization, **_LORA}
    return {"of": "transformers", "model": model, "sequence": 600}


CANDIDATES: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "convolutions": {
        **{
            name: ({"of": name}, batch)
            for name, batch in {
                "mobilenet-v2": 80, "efficientnet-b0": 64, "densenet121": 40, "resnext50": 48, "resnext-wide": 20,
                "shufflenet": 160, "mnasnet": 96, "squeezenet": 128, "vgg16": 32, "googlenet": 80, "inception": 32,
                "convnext": 40, "convnext-small": 40, "wide-resnet-last": 48, "resnet101-last": 40, "alexnet": 256,
                "resnet34-last": 64, "mobilenet-v3": 128,
            }.items()
        },
        "regnet-z": (_class("RegNetForImageClassification", layer_type="y", hidden_sizes=[48, 104, 208, 440],
                            groups_width=8, depths=[3, 8, 27, 2]), 48),
        "resnet50": (_class("ResNetForImageClassification", num_labels=100), 64),
    },
    "images and video": {
        name: ({"of": name}, batch)
        for name, batch in {
            "deeplab": 8, "fcn": 8, "lraspp": 20, "segmenter": 24, "denoiser": 16, "autoencoder": 160, "upscaler": 32,
            "r3d": 8, "r2plus1d": 6, "short-mc3": 12, "short-s3d": 6, "volumes": 4,
        }.items()
    },
    "sound and sequences": {
        **{
            name: ({"of": name}, batch)
            for name, batch in {
                "separator": 12, "waves": 10, "recogniser": 16, "lstm": 64, "lstm-both": 64, "gru": 96, "rnn": 96,
                "wide-lstm": 48,
            }.items()
        },
        "whisper-base": (_hub("openai/whisper-base", "WhisperForConditionalGeneration") | {"target": 60}, 12),
        "wavlm": (_class("WavLMForSequenceClassification", num_hidden_layers=4), 6),
    },
    "embeddings": {
        name: ({"of": name}, batch)
        for name, batch in {"recommender": 6144, "deep-recommender": 4096, "words": 8192, "towers": 8192}.items()
    },
    "vision transformers": {
        **{name: ({"of": name}, batch) for name, batch in {"swin-t": 32, "vit-b": 32, "vit-b-32": 96}.items()},
        "deit": (_hub("facebook/deit-base-distilled-patch16-224", "DeiTForImageClassification"), 24),
        "beit": (_class("BeitForImageClassification", num_hidden_layers=6), 24),
    },
    "language": {
        "bert-base": (_hub("google-bert/bert-base-cased", "BertForTokenClassification") | {"sequence": 300}, 24),
        "electra": (_class("ElectraForMaskedLM", num_hidden_layers=8, hidden_size=512, intermediate_size=2048,
                           num_attention_heads=8) | {"sequence": 400}, 16),
        "deberta": (_class("DebertaV2ForSequenceClassification", num_hidden_layers=6, hidden_size=768,
                           num_attention_heads=12, intermediate_size=3072) | {"sequence": 250}, 12),
        "opt": (_hub("facebook/opt-125m", "OPTForCausalLM") | {"sequence": 700}, 8),
        "pythia": (_hub("EleutherAI/pythia-410m", "GPTNeoXForCausalLM") | {"sequence": 600}, 4),
        "qwen2": (_hub("Qwen/Qwen2.5-0.5B", "Qwen2ForCausalLM", num_hidden_layers=12) | {"sequence": 800}, 4),
        "gemma": (_hub("google/gemma-2b", "GemmaForCausalLM", num_hidden_layers=3) | {"sequence": 500}, 3),
        "flan-t5": (_hub("google/flan-t5-small", "T5ForConditionalGeneration") | {"sequence": 400, "target": 100}, 16),
        "llama-lora": ({"of": "llama", "model": _LORA, "sequence": 1000}, 3),
        "llama-nf4": ({"of": "llama", "model": {"dtype": "bfloat16", "quantization": _NF4, **_LORA},
                       "sequence": 700}, 2),
        "phi-lora": (_hub("microsoft/phi-2", "PhiForCausalLM", num_hidden_layers=6) | {"sequence": 700}, 3),
        "gpt2-medium": (_hub("openai-community/gpt2-medium", "GPT2LMHeadModel") | {"sequence": 500}, 4),
    },
}  # fmt: skip
"""For each family the models with their usual batch."""

NEVER_TIMED: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "transformers never timed": {
        "albert": (_class("AlbertForMaskedLM", hidden_size=768, intermediate_size=3072, num_attention_heads=12)
                   | {"sequence": 384}, 16),
        "bigbird": (_class("BigBirdForSequenceClassification", num_hidden_layers=6) | {"sequence": 1024}, 4),
        "bloom": (_class("BloomForCausalLM", hidden_size=1024, n_layer=10, n_head=16, vocab_size=60000)
                  | {"sequence": 600}, 6),
        "canine": (_class("CanineForTokenClassification", num_hidden_layers=6) | {"sequence": 768}, 8),
        "codegen": (_class("CodeGenForCausalLM", n_layer=8, n_embd=1024, n_head=16, rotary_dim=32)
                    | {"sequence": 512}, 6),
        "convbert": (_class("ConvBertForSequenceClassification", num_hidden_layers=8) | {"sequence": 256}, 24),
        "falcon": (_class("FalconForCausalLM", hidden_size=1024, num_hidden_layers=10, num_attention_heads=16)
                   | {"sequence": 700}, 6),
        "fnet": (_class("FNetForMaskedLM") | {"sequence": 384}, 24),
        "funnel": (_class("FunnelForSequenceClassification") | {"sequence": 256}, 16),
        "gpt-neo": (_class("GPTNeoForCausalLM", num_layers=8, hidden_size=1024, num_heads=16,
                           attention_types=[[["global", "local"], 4]]) | {"sequence": 700}, 6),
        "gptj": (_class("GPTJForCausalLM", n_layer=6, n_embd=1536, n_head=16, rotary_dim=32) | {"sequence": 500}, 6),
        "longformer": (_class("LongformerForSequenceClassification", num_hidden_layers=6) | {"sequence": 1536}, 3),
        "mobilebert": (_class("MobileBertForSequenceClassification") | {"sequence": 256}, 32),
        "mpnet": (_class("MPNetForMaskedLM") | {"sequence": 320}, 16),
        "nystromformer": (_class("NystromformerForSequenceClassification") | {"sequence": 510}, 12),
        "olmo2": (_class("Olmo2ForCausalLM", hidden_size=1280, intermediate_size=3584, num_hidden_layers=8,
                         num_attention_heads=16, num_key_value_heads=16, vocab_size=50000) | {"sequence": 800}, 4),
        "olmoe": (_class("OlmoeForCausalLM", hidden_size=768, intermediate_size=768, num_hidden_layers=6,
                         num_experts=16, num_experts_per_tok=4, vocab_size=40000) | {"sequence": 600}, 6),
        "pegasus": (_class("PegasusForConditionalGeneration", encoder_layers=6, decoder_layers=6)
                    | {"sequence": 300, "target": 80}, 8),
        "roformer": (_class("RoFormerForSequenceClassification", num_hidden_layers=8) | {"sequence": 384}, 16),
        "stablelm": (_class("StableLmForCausalLM", hidden_size=1280, intermediate_size=3584, num_hidden_layers=8,
                            num_attention_heads=16, num_key_value_heads=16) | {"sequence": 700}, 4),
        "xlnet": (_class("XLNetForSequenceClassification", d_model=768, n_layer=8, n_head=12, d_inner=3072)
                  | {"sequence": 320}, 12),
    },
    "images and sound of transformers never timed": {
        "audio-spectrogram": (_class("ASTForAudioClassification", num_hidden_layers=6), 6),
        "bit": (_class("BitForImageClassification"), 32),
        "convnext-v2": (_class("ConvNextV2ForImageClassification"), 48),
        "conformer": (_class("Wav2Vec2ConformerForSequenceClassification", num_hidden_layers=4), 6),
        "cvt": (_class("CvtForImageClassification"), 32),
        "data2vec": (_class("Data2VecAudioForSequenceClassification", num_hidden_layers=6), 6),
        "dpt": (_class("DPTForSemanticSegmentation", num_hidden_layers=12), 4),
        "focalnet": (_class("FocalNetForImageClassification"), 32),
        "hiera": (_class("HieraForImageClassification"), 24),
        "levit": (_class("LevitForImageClassification"), 128),
        "mae": (_class("ViTMAEForPreTraining"), 32),
        "mobilevit": (_class("MobileViTForImageClassification"), 48),
        "poolformer": (_class("PoolFormerForImageClassification"), 48),
        "pvt-v2": (_class("PvtV2ForImageClassification"), 48),
        "segformer": (_class("SegformerForSemanticSegmentation", num_labels=20), 8),
        "speech2text": (_class("Speech2TextForConditionalGeneration") | {"target": 60}, 16),
        "swin-v2": (_class("Swinv2ForImageClassification"), 24),
        "timesformer": (_class("TimesformerForVideoClassification", num_hidden_layers=6), 3),
        "video-mae": (_class("VideoMAEForVideoClassification", num_hidden_layers=6), 4),
        "yolos": (_class("YolosForObjectDetection", num_hidden_layers=6, image_size=[256, 384]), 6),
    },
}  # fmt: skip
"""The same for architectures of transformers of which no training had been timed before 2026-11-23."""

FURTHER: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "texts": {
        "cohere": (_class("CohereForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                          num_attention_heads=16, num_key_value_heads=16, vocab_size=50000) | {"sequence": 600}, 6),
        "deberta-v1": (_class("DebertaForSequenceClassification", num_hidden_layers=6) | {"sequence": 256}, 16),
        "fsmt": (_class("FSMTForConditionalGeneration", langs=["en", "de"], src_vocab_size=32000, tgt_vocab_size=32000,
                        encoder_layers=6, decoder_layers=6) | {"sequence": 200, "target": 60}, 12),
        "gemma2": (_class("Gemma2ForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                          num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=60000)
                   | {"sequence": 700}, 4),
        "gemma3": (_class("Gemma3ForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                          num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=60000)
                   | {"sequence": 700}, 4),
        "glm4": (_class("Glm4ForCausalLM", hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
                        num_attention_heads=16, num_key_value_heads=4, vocab_size=50000, pad_token_id=0)
                 | {"sequence": 700}, 4),
        "granite": (_class("GraniteForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=10,
                           num_attention_heads=16, num_key_value_heads=4, vocab_size=40000) | {"sequence": 800}, 4),
        "led": (_class("LEDForConditionalGeneration", encoder_layers=4, decoder_layers=4, d_model=768,
                       attention_window=256) | {"sequence": 1024, "target": 80}, 3),
        "layoutlm": (_class("LayoutLMForTokenClassification", num_hidden_layers=8) | {"sequence": 400}, 12),
        "long-t5": (_class("LongT5ForConditionalGeneration", d_model=512, num_layers=6, num_decoder_layers=6)
                    | {"sequence": 900, "target": 60}, 4),
        "mamba2": (_class("Mamba2ForCausalLM", hidden_size=512, num_hidden_layers=4, num_heads=16, head_dim=64,
                          n_groups=1, vocab_size=30000) | {"sequence": 512}, 4),
        "mbart": (_class("MBartForConditionalGeneration", encoder_layers=6, decoder_layers=6, d_model=768,
                         vocab_size=60000) | {"sequence": 256, "target": 64}, 10),
        "phi3": (_class("Phi3ForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                        num_attention_heads=16, num_key_value_heads=16, pad_token_id=0) | {"sequence": 700}, 5),
        "qwen2-moe": (_class("Qwen2MoeForCausalLM", hidden_size=768, intermediate_size=2048, moe_intermediate_size=512,
                             shared_expert_intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
                             num_key_value_heads=4, num_experts=12, num_experts_per_tok=3, vocab_size=40000)
                      | {"sequence": 600}, 5),
        "smollm3": (_class("SmolLM3ForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                           num_attention_heads=16, num_key_value_heads=4, vocab_size=50000, pad_token_id=0)
                    | {"sequence": 700}, 4),
        "squeezebert": (_class("SqueezeBertForTokenClassification", num_hidden_layers=8) | {"sequence": 256}, 24),
        "starcoder2": (_class("Starcoder2ForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                              num_attention_heads=16, num_key_value_heads=2) | {"sequence": 700}, 4),
        "umt5": (_class("UMT5ForConditionalGeneration", d_model=512, d_ff=1024, num_layers=6, num_decoder_layers=6,
                        vocab_size=60000) | {"sequence": 300, "target": 60}, 12),
        "xglm": (_class("XGLMForCausalLM", d_model=1024, ffn_dim=4096, num_layers=8, attention_heads=16,
                        vocab_size=60000) | {"sequence": 600}, 5),
    },
    "images, sound, several kinds and series": {
        "clip": (_class("CLIPForImageClassification"), 64),
        "dinov2-registers": (_class("Dinov2WithRegistersForImageClassification", num_hidden_layers=8), 24),
        "efficientnet-hf": (_class("EfficientNetForImageClassification", width_coefficient=1.0, depth_coefficient=1.1,
                                   image_size=240, hidden_dim=1280), 32),
        "data2vec-vision": (_class("Data2VecVisionForImageClassification", num_hidden_layers=8), 24),
        "ijepa": (_class("IJepaForImageClassification", num_hidden_layers=6), 24),
        "mobilenet-v1": (_class("MobileNetV1ForImageClassification"), 96),
        "patch-series": (_class("PatchTSTForPrediction", context_length=512, num_input_channels=7, d_model=256,
                                num_hidden_layers=4, num_attention_heads=8), 64),
        "rt-detr": (_class("RTDetrForObjectDetection"), 4),
        "sew": (_class("SEWForSequenceClassification", num_hidden_layers=6), 8),
        "siglip": (_class("SiglipForImageClassification"), 48),
        "swiftformer": (_class("SwiftFormerForImageClassification"), 64),
        "unispeech": (_class("UniSpeechForSequenceClassification", num_hidden_layers=4), 6),
        "upernet": (_class("UperNetForSemanticSegmentation"), 4),
        "vilt": (_class("ViltForQuestionAnswering", num_hidden_layers=8), 8),
        "vivit": (_class("VivitForVideoClassification", num_hidden_layers=4), 2),
        "wav2vec2-bert": (_class("Wav2Vec2BertForSequenceClassification", num_hidden_layers=4), 6),
    },
}  # fmt: skip
"""Further such architectures, without those of ``NEVER_TIMED``."""

OTHERS: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "texts": {
        "blenderbot": (_class("BlenderbotSmallForConditionalGeneration") | {"sequence": 128, "target": 48}, 24),
        "bros": (_class("BrosForTokenClassification", num_hidden_layers=6) | {"sequence": 384}, 8),
        "camembert": (_class("CamembertForMaskedLM", num_hidden_layers=8) | {"sequence": 350}, 16),
        "diff-llama": (_class("DiffLlamaForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=6,
                              num_attention_heads=16, num_key_value_heads=16) | {"sequence": 500}, 4),
        "eurobert": (_class("EuroBertForMaskedLM", hidden_size=768, intermediate_size=3072, num_hidden_layers=8,
                            num_attention_heads=12, num_key_value_heads=12, vocab_size=60000, pad_token_id=0)
                     | {"sequence": 600}, 8),
        "gpt-bigcode": (_class("GPTBigCodeForCausalLM", n_layer=8, n_embd=1024, n_head=16) | {"sequence": 700}, 5),
        "helium": (_class("HeliumForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                          num_attention_heads=16, num_key_value_heads=16, head_dim=64, vocab_size=48000)
                   | {"sequence": 600}, 5),
        "luke": (_class("LukeForTokenClassification", num_hidden_layers=6) | {"sequence": 256}, 12),
        "markuplm": (_class("MarkupLMForTokenClassification", num_hidden_layers=6) | {"sequence": 384}, 10),
        "megatron-bert": (_class("MegatronBertForMaskedLM", num_hidden_layers=10) | {"sequence": 400}, 8),
        "mpt": (_class("MptForCausalLM", d_model=1024, n_heads=16, n_layers=8, vocab_size=50000)
                | {"sequence": 600}, 5),
        "mvp": (_class("MvpForConditionalGeneration", encoder_layers=4, decoder_layers=4)
                | {"sequence": 256, "target": 64}, 8),
        "olmo3": (_class("Olmo3ForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                         num_attention_heads=16, num_key_value_heads=16, vocab_size=50000) | {"sequence": 700}, 4),
        "persimmon": (_class("PersimmonForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                             num_attention_heads=16, vocab_size=50000, pad_token_id=0, bos_token_id=1, eos_token_id=2)
                      | {"sequence": 600}, 5),
        "plbart": (_class("PLBartForConditionalGeneration") | {"sequence": 200, "target": 64}, 16),
        "prophetnet": (_class("ProphetNetForConditionalGeneration", num_encoder_layers=4, num_decoder_layers=4)
                       | {"sequence": 200, "target": 50}, 8),
        "rembert": (_class("RemBertForMaskedLM", num_hidden_layers=6, vocab_size=60000) | {"sequence": 256}, 10),
        "splinter": (_class("SplinterForQuestionAnswering", num_hidden_layers=8) | {"sequence": 384}, 10),
    },
    "images and sound": {
        "donut-swin": (_class("DonutSwinForImageClassification"), 24),
        "hgnet": (_class("HGNetV2ForImageClassification"), 64),
        "hubert-ctc": (_class("HubertForCTC", num_hidden_layers=4), 6),
        "image-gpt": (_class("ImageGPTForImageClassification", n_layer=6, n_embd=512, n_head=8), 4),
        "mobilenet-v2-hf": (_class("MobileNetV2ForImageClassification"), 80),
        "mobilevit-v2": (_class("MobileViTV2ForImageClassification"), 48),
        "moonshine": (_class("MoonshineForConditionalGeneration", pad_token_id=0) | {"target": 40}, 8),
        "pvt": (_class("PvtForImageClassification"), 48),
        "swin-masked": (_class("SwinForMaskedImageModeling"), 24),
        "textnet": (_class("TextNetForImageClassification"), 16),
        "unispeech-sat": (_class("UniSpeechSatForSequenceClassification", num_hidden_layers=4), 6),
        "vit-msn": (_class("ViTMSNForImageClassification", num_hidden_layers=8), 24),
    },
}  # fmt: skip
"""Other such architectures."""
LATEST: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "language models of other kinds": {
        "bamba": (_class("BambaForCausalLM", hidden_size=768, intermediate_size=2048, num_hidden_layers=4,
                         vocab_size=40000, attn_layer_indices=[2], num_attention_heads=12, num_key_value_heads=4,
                         mamba_n_heads=24, mamba_d_head=64, mamba_d_state=64, pad_token_id=0) | {"sequence": 512}, 4),
        "cohere2": (_class("Cohere2ForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                           num_attention_heads=16, num_key_value_heads=4, vocab_size=50000) | {"sequence": 700}, 5),
        "ctrl": (_class("CTRLForSequenceClassification", n_layer=8, n_embd=768, n_head=12, dff=3072, vocab_size=50000)
                 | {"sequence": 300}, 12),
        "deepseek-v2": (_class("DeepseekV2ForCausalLM", hidden_size=768, intermediate_size=2048, num_hidden_layers=5,
                               num_attention_heads=12, num_key_value_heads=12, moe_intermediate_size=512,
                               n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, n_group=1, topk_group=1,
                               first_k_dense_replace=1, vocab_size=40000) | {"sequence": 500}, 5),
        "exaone4": (_class("Exaone4ForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                           num_attention_heads=16, num_key_value_heads=4, vocab_size=50000) | {"sequence": 700}, 5),
        "falcon-h1": (_class("FalconH1ForCausalLM", hidden_size=768, intermediate_size=2048, num_hidden_layers=4,
                             num_attention_heads=12, num_key_value_heads=4, mamba_d_ssm=768, mamba_n_heads=12,
                             mamba_d_head=64, mamba_d_state=64, vocab_size=40000) | {"sequence": 512}, 4),
        "gpt-oss": (_class("GptOssForCausalLM", hidden_size=768, intermediate_size=768, num_hidden_layers=5,
                           num_attention_heads=12, num_key_value_heads=4, head_dim=64, num_local_experts=8,
                           num_experts_per_tok=2, vocab_size=50000) | {"sequence": 500}, 5),
        "granite-moe": (_class("GraniteMoeForCausalLM", hidden_size=768, intermediate_size=1024, num_hidden_layers=6,
                               num_attention_heads=12, num_key_value_heads=4, num_local_experts=8,
                               num_experts_per_tok=2, vocab_size=40000) | {"sequence": 500}, 5),
        "jamba": (_class("JambaForCausalLM", hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=4, num_experts=4, attn_layer_period=4,
                         attn_layer_offset=2, vocab_size=40000, use_mamba_kernels=False) | {"sequence": 256}, 4),
        "lfm2": (_class("Lfm2ForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                        num_attention_heads=16, num_key_value_heads=4, vocab_size=50000) | {"sequence": 700}, 6),
        "minimax": (_class("MiniMaxForCausalLM", hidden_size=768, intermediate_size=1024, num_hidden_layers=4,
                           num_attention_heads=12, num_key_value_heads=4, head_dim=64, num_local_experts=4,
                           vocab_size=40000) | {"sequence": 512}, 4),
        "nemotron": (_class("NemotronForCausalLM", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
                            num_attention_heads=16, num_key_value_heads=4, vocab_size=50000) | {"sequence": 700}, 5),
        "phimoe": (_class("PhimoeForCausalLM", hidden_size=768, intermediate_size=1024, num_hidden_layers=5,
                          num_attention_heads=12, num_key_value_heads=4, num_local_experts=8, vocab_size=32064)
                   | {"sequence": 500}, 5),
        "qwen3-moe": (_class("Qwen3MoeForCausalLM", hidden_size=768, intermediate_size=2048, moe_intermediate_size=512,
                             num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=4,
                             num_experts=16, num_experts_per_tok=4, vocab_size=50000) | {"sequence": 600}, 5),
        "qwen3-next": (_class("Qwen3NextForCausalLM", hidden_size=768, intermediate_size=2048, num_hidden_layers=4,
                              num_attention_heads=12, num_key_value_heads=4, head_dim=64, num_experts=8,
                              num_experts_per_tok=2, moe_intermediate_size=512, shared_expert_intermediate_size=512,
                              linear_num_key_heads=8, linear_num_value_heads=8, linear_key_head_dim=64,
                              linear_value_head_dim=64, vocab_size=50000) | {"sequence": 384}, 4),
        "recurrent-gemma": (_class("RecurrentGemmaForCausalLM", hidden_size=768, intermediate_size=4608, lru_width=768,
                                   num_hidden_layers=3, num_attention_heads=12, vocab_size=40000)
                            | {"sequence": 128}, 4),
        "zamba2": (_class("Zamba2ForCausalLM", hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
                          layers_block_type=["mamba", "hybrid", "mamba", "mamba"], mamba_d_state=64,
                          n_mamba_heads=8, vocab_size=32000, num_mem_blocks=1) | {"sequence": 256}, 4),
    },
    "encoders and translation never drawn": {
        "big-bird-mlm": (_class("BigBirdForMaskedLM", num_hidden_layers=6) | {"sequence": 1024}, 4),
        "bigbird-pegasus": (_class("BigBirdPegasusForConditionalGeneration", encoder_layers=4, decoder_layers=4,
                                   d_model=768, vocab_size=60000) | {"sequence": 1024, "target": 64}, 4),
        "ernie": (_class("ErnieForMaskedLM", num_hidden_layers=8) | {"sequence": 320}, 12),
        "esm": (_class("EsmForMaskedLM", vocab_size=33, hidden_size=640, num_hidden_layers=10, num_attention_heads=20,
                       intermediate_size=2560, pad_token_id=1, mask_token_id=32) | {"sequence": 400}, 10),
        "ibert": (_class("IBertForSequenceClassification", num_hidden_layers=8) | {"sequence": 256}, 16),
        "layoutlm-v3": (_class("LayoutLMv3ForTokenClassification", num_hidden_layers=6) | {"sequence": 300}, 8),
        "lilt": (_class("LiltForTokenClassification", num_hidden_layers=8) | {"sequence": 384}, 10),
        "nomic-bert": (_class("NomicBertForMaskedLM", num_hidden_layers=8) | {"sequence": 400}, 10),
        "pegasus-x": (_class("PegasusXForConditionalGeneration", encoder_layers=4, decoder_layers=4, d_model=768,
                             vocab_size=60000) | {"sequence": 1024, "target": 64}, 4),
        "reformer": (_class("ReformerForSequenceClassification", is_decoder=False, axial_pos_embds=False,
                            hidden_size=512, num_attention_heads=8) | {"sequence": 512}, 8),
        "roc-bert": (_class("RoCBertForMaskedLM", num_hidden_layers=6) | {"sequence": 300}, 12),
        "tapas": (_class("TapasForMaskedLM", num_hidden_layers=8) | {"sequence": 300}, 10),
        "xlm": (_class("XLMForSequenceClassification", n_layers=6, emb_dim=1024, n_heads=16) | {"sequence": 256}, 12),
        "xlm-roberta-xl": (_class("XLMRobertaXLForMaskedLM", num_hidden_layers=5, hidden_size=1280,
                                  intermediate_size=5120, num_attention_heads=20, vocab_size=60000)
                           | {"sequence": 300}, 6),
        "xmod": (_class("XmodForMaskedLM", num_hidden_layers=8, languages=["en_XX", "de_DE"], default_language="en_XX")
                 | {"sequence": 300}, 10),
    },
    "detection, segmentation and depth": {
        "mask2former": (_class("Mask2FormerForUniversalSegmentation"), 2),
        "maskformer": (_class("MaskFormerForInstanceSegmentation"), 2),
        "mobilenet-v2-seg": (_class("MobileNetV2ForSemanticSegmentation", num_labels=20), 16),
        "mobilevit-seg": (_class("MobileViTForSemanticSegmentation", num_labels=20), 12),
        "beit-seg": (_class("BeitForSemanticSegmentation", num_hidden_layers=6, num_labels=20,
                            out_indices=[1, 2, 4, 6]), 4),
        "rt-detr-v2": (_class("RTDetrV2ForObjectDetection"), 4),
    },
    "images, videos and several kinds never drawn": {
        "git": (_class("GitForCausalLM", num_hidden_layers=4) | {"sequence": 100}, 8),
        "metaclip2": (_class("MetaClip2ForImageClassification"), 32),
        "siglip2": (_class("Siglip2ForImageClassification"), 32),
        "v-jepa2": (_class("VJEPA2ForVideoClassification", num_hidden_layers=4), 2),
        "vilt-mlm": (_class("ViltForMaskedLM", num_hidden_layers=8) | {"sequence": 40}, 8),
    },
    "quantised": {
        "mistral-nf4": (_quantised("MistralForCausalLM", _NF4, hidden_size=2048, intermediate_size=5632,
                                   num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4), 3),
        "qwen3-nf4": (_quantised("Qwen3ForCausalLM", _NF4, hidden_size=2048, intermediate_size=6144,
                                 num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
                                 vocab_size=60000), 3),
        "opt-int8": (_quantised("OPTForCausalLM", {"load_in_8bit": True}, hidden_size=2048, ffn_dim=8192,
                                num_hidden_layers=6, num_attention_heads=32, word_embed_proj_dim=2048), 3),
    },
    "sound and series never drawn": {
        "parakeet": (_class("ParakeetForCTC"), 4),
        "patch-mixer": (_class("PatchTSMixerForPrediction", context_length=512, num_input_channels=7, d_model=128,
                               num_layers=6), 128),
        "sew-d": (_class("SEWDForSequenceClassification", num_hidden_layers=6), 6),
        "speecht5": (_class("SpeechT5ForSpeechToText", encoder_layers=4, decoder_layers=4) | {"target": 40}, 4),
        "whisper-audio": (_class("WhisperForAudioClassification", encoder_layers=6), 8),
    },
}  # fmt: skip

COMING: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "language models not drawn before": {
        **{
            name: (_class(f"{kind}ForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                          num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=50000,
                          pad_token_id=0) | {"sequence": 600}, 5)
            for name, kind in {
                "apertus": "Apertus", "arcee": "Arcee", "bitnet": "BitNet", "ernie4-5": "Ernie4_5", "glm": "Glm",
                "hunyuan-dense": "HunYuanDenseV1", "ministral": "Ministral", "olmo": "Olmo", "seed-oss": "SeedOss",
                "vaultgemma": "VaultGemma", "doge": "Doge",
            }.items()
        },
        "nanochat": (_class("NanoChatForCausalLM", hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                            num_attention_heads=16, num_key_value_heads=4, vocab_size=50000) | {"sequence": 600}, 5),
        "biogpt": (_class("BioGptForCausalLM", hidden_size=1024, num_hidden_layers=8, num_attention_heads=16,
                          intermediate_size=4096) | {"sequence": 400}, 8),
        "modernbert-decoder": (_class("ModernBertDecoderForCausalLM", num_hidden_layers=10) | {"sequence": 512}, 8),
        "openai-gpt": (_class("OpenAIGPTForSequenceClassification", n_layer=8, pad_token_id=0)
                       | {"sequence": 384}, 12),
        "dots1": (_class("Dots1ForCausalLM", hidden_size=768, intermediate_size=2048, moe_intermediate_size=512,
                         num_hidden_layers=5, num_attention_heads=12, num_key_value_heads=4, n_shared_experts=1,
                         n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
                         vocab_size=40000) | {"sequence": 500}, 5),
        "ernie4-5-moe": (_class("Ernie4_5_MoeForCausalLM", hidden_size=768, intermediate_size=2048,
                                moe_intermediate_size=512, num_hidden_layers=6, num_attention_heads=12,
                                num_key_value_heads=4, moe_num_experts=8, moe_k=2, vocab_size=50000)
                         | {"sequence": 500}, 5),
        "granite-moe-shared": (_class("GraniteMoeSharedForCausalLM", hidden_size=768, intermediate_size=1024,
                                      shared_intermediate_size=1024, num_hidden_layers=6, num_attention_heads=12,
                                      num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
                                      vocab_size=40000) | {"sequence": 500}, 5),
    },
    "encoders and translation not drawn before": {
        "data2vec-text": (_class("Data2VecTextForMaskedLM", num_hidden_layers=8) | {"sequence": 300}, 12),
        "flaubert": (_class("FlaubertForSequenceClassification", n_layers=6, emb_dim=1024, n_heads=16)
                     | {"sequence": 256}, 12),
        "roberta-prelayernorm": (_class("RobertaPreLayerNormForMaskedLM", num_hidden_layers=8) | {"sequence": 300}, 10),
        "xlm-roberta": (_class("XLMRobertaForTokenClassification", num_hidden_layers=8) | {"sequence": 384}, 10),
        "mt5": (_class("MT5ForConditionalGeneration", num_layers=6, vocab_size=60000) | {"sequence": 300, "target": 64},
                8),
        "m2m-100": (_class("M2M100ForConditionalGeneration", encoder_layers=5, decoder_layers=5, vocab_size=60000)
                    | {"sequence": 256, "target": 64}, 8),
        "esmc": (_class("EsmcForMaskedLM", hidden_size=640, num_hidden_layers=8, num_attention_heads=10)
                 | {"sequence": 400}, 8),
    },
    "images not drawn before": {
        **{
            name: ({"of": name}, batch)
            for name, batch in {
                "maxvit": 24, "densenet201": 32, "resnet18": 96, "regnet-y-torchvision": 64, "efficientnet-b4": 24,
                "shufflenet-double": 96, "vgg11": 48, "deeplab-large": 6,
            }.items()
        },
        "vit-masked": (_class("ViTForMaskedImageModeling", num_hidden_layers=8, encoder_stride=16), 24),
        "convnext-hf": (_class("ConvNextForImageClassification"), 32),
        "vit-hf": (_class("ViTForImageClassification", num_hidden_layers=8), 32),
        "eomt": (_class("EomtForUniversalSegmentation", num_hidden_layers=6), 2),
    },
    "sound not drawn before": {
        "lasr": (_class("LasrForCTC"), 4),
    },
    "quantised weights not drawn before": {
        "olmo-nf4": (_quantised("OlmoForCausalLM", _NF4, hidden_size=2048, intermediate_size=5632,
                                num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4,
                                vocab_size=50000), 3),
        "arcee-int8": (_quantised("ArceeForCausalLM", {"load_in_8bit": True}, hidden_size=2048, intermediate_size=5632,
                                  num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4,
                                  vocab_size=50000), 3),
    },
}  # fmt: skip
"""The newest such architectures."""

SETS = {
    "usual": CANDIDATES,
    "never timed": NEVER_TIMED,
    "further": FURTHER,
    "others": OTHERS,
    "usual and latest": CANDIDATES | LATEST,
    "usual and coming": CANDIDATES | COMING,
}


def drawn(
    seed: int, count: int, candidates: Mapping[str, Mapping[str, tuple[dict[str, Any], int]]]
) -> dict[str, dict[str, Any]]:
    """Return rows by their names: from each family as many as its share, with a precision and a batch."""
    random, ending = Random(seed), "drawn" if seed in UNNUMBERED else f"drawn-{seed}"
    total = sum(map(len, candidates.values()))
    rows: dict[str, dict[str, Any]] = {}
    for family in candidates.values():
        for name in sorted(random.sample(sorted(family), round(count * len(family) / total))):
            settings, usual = family[name]
            precision = "bf16" if "quantization" in settings.get("model", {}) else random.choice(PRECISIONS)
            row = {**settings, "batch": max(round(usual * random.choice(FACTORS)), 1)}
            if precision != "fp32":
                row["precision"] = precision
            rows[f"{name}-{precision}-{ending}"] = row
    return rows


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--of", choices=tuple(SETS), default="usual", help="what to draw from")
    options = parser.parse_args()
    for name, row in drawn(options.seed, options.count, SETS[options.of]).items():
        print(f"  {name}: {json.dumps(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
