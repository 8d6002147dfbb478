"""The batches of models that join parts, or read what few others do: on the CPU and in a simulation."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainatomy.errors import WorkloadError
from trainatomy.simulator.simulate import simulate
from trainatomy.training.batch import build_batch
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run
from trainatomy.training.shape import Shape
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 200,
}
_VIT = {**_BERT, "image_size": 32, "patch_size": 8}
_GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 200}
_BLIP2 = {
    "num_query_tokens": 4,
    "text_config": {
        "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 200, "word_embed_proj_dim": 32,
    },
    "vision_config": _VIT,
    "qformer_config": {**_BERT, "encoder_hidden_size": 32},
}  # fmt: skip
_CLAP = {
    "text_config": _BERT,
    "audio_config": {
        "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
        "num_hidden_layers": 2, "num_mel_bins": 64, "spec_size": 256,
    },
}  # fmt: skip

_LLAMA = {**_BERT, "model_type": "llama", "num_key_value_heads": 2}
_TILED = {"text_config": _LLAMA, "image_token_index": 150, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
_AUDIO = {"num_mel_bins": 16, "max_source_positions": 20}
_QWEN2_AUDIO = {
    "text_config": {**_LLAMA, "model_type": "qwen2"},
    "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, **_AUDIO},
    "audio_token_index": 150,
}  # fmt: skip
_IDEFICS2 = {
    "text_config": {**_LLAMA, "model_type": "mistral"},
    "vision_config": _VIT,
    "perceiver_config": {
        "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 16,
        "num_key_value_heads": 2, "hidden_size": 32,
    },
    "image_token_id": 150,
}  # fmt: skip
_PARTS: dict[str, tuple[dict[str, Any], int]] = {
    "Idefics2ForConditionalGeneration": (_IDEFICS2, 4),  # latents of the resampler
    "Idefics3ForConditionalGeneration": (
        {"text_config": _LLAMA, "vision_config": _VIT, "scale_factor": 2, "image_token_id": 150, "pad_token_id": 0},
        4,  # 4 x 4 patches, 2 x 2 of them a token
    ),
    # the whole image and 2 x 2 tiles of 4 x 4 patches; a token ends each of the 8 rows of the tiles
    "LlavaNextForConditionalGeneration": ({**_TILED, "vision_config": {**_VIT, "model_type": "clip_vision_model"}}, 88),
    "LlavaOnevisionForConditionalGeneration": (
        {**_TILED, "vision_config": {**_VIT, "model_type": "siglip_vision_model"}},
        88,
    ),
    "InstructBlipForConditionalGeneration": ({**_BLIP2, "image_token_index": 150}, 4),
    "Qwen2AudioForConditionalGeneration": (_QWEN2_AUDIO, 10),  # 40 frames, 20 positions, halved
    "VoxtralForConditionalGeneration": (
        {
            "text_config": _LLAMA,
            "audio_config": {**_BERT, "intermediate_size": 128, "vocab_size": 51, **_AUDIO},
            "audio_token_id": 150,
        },
        5,  # 20 positions of 32 numbers, joined to 128
    ),
}


@pytest.mark.parametrize("name", _PARTS)
def test_placeholders_are_as_many_as_the_parts_that_replace_them(name: str) -> None:
    config, tokens = _PARTS[name]
    train = {"per_device_train_batch_size": 2}
    workload = Workload.from_mapping({"model": {"class": name, "config": copy.deepcopy(config)}, "train": train})
    model = build_model(workload)
    batch = build_batch(workload, model)
    placeholders = batch["input_ids"] == 150
    assert placeholders.sum(-1).tolist() == [tokens] * 2
    assert (batch["labels"][placeholders] == -100).all()
    assert model(**batch).loss.dim() == 0


def test_a_page_is_read_with_its_image(describe: Any) -> None:
    config = {**_BERT, "input_size": 32, "patch_size": 8, "coordinate_size": 6, "shape_size": 4, "num_labels": 3}
    workload = describe("LayoutLMv3ForTokenClassification", model={"config": config})
    batch = build_batch(workload, build_model(workload))
    assert batch["pixel_values"].shape == (2, 3, 32, 32) and batch["bbox"].shape == (2, 16, 4)
    assert build_model(workload)(**batch).loss.dim() == 0


@pytest.mark.parametrize("name", ["Qwen2AudioForConditionalGeneration", "LlavaNextForConditionalGeneration"])
def test_the_step_of_a_model_that_merges_parts_is_predicted(name: str) -> None:
    config, _ = _PARTS[name]
    workload = Workload.from_mapping({"model": {"class": name, "config": copy.deepcopy(config)}, "steps": 1})
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


def test_a_recording_whose_tokens_are_unknown_needs_a_factory(describe: Any) -> None:
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, **_AUDIO}
    config = {"text_config": {**_LLAMA, "model_type": "qwen2"}, "audio_config": audio, "audio_token_id": 150}
    workload = describe("AudioFlamingo3ForConditionalGeneration", model={"config": config})
    with pytest.raises(WorkloadError, match=r"data\.factory: trainatomy cannot make the input_features and the tokens"):
        build_batch(workload, build_model(workload))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "EncoderDecoderModel",
            {"encoder": {"model_type": "bert", **_BERT}, "decoder": {"model_type": "bert", **_BERT}},
        ),
        ("VisionEncoderDecoderModel", {"encoder": {"model_type": "vit", **_VIT}, "decoder": _GPT2}),
        ("GitForCausalLM", {**_BERT, "vision_config": _VIT}),
        ("Blip2ForConditionalGeneration", _BLIP2),
        ("ClapModel", _CLAP),
    ],
)
def test_models_of_several_parts_take_the_batch_that_is_made(name: str, config: dict[str, Any]) -> None:
    mapping = {"model": {"class": name, "config": config}, "train": {"per_device_train_batch_size": 2}}
    before = copy.deepcopy(mapping)
    for _ in range(2):  # a configuration may remove keys from its arguments
        workload = Workload.from_mapping(mapping)
        model = build_model(workload)
        loss = model(**build_batch(workload, model)).loss
        assert loss.dim() == 0
        assert mapping == before


@pytest.mark.parametrize(
    ("class_name", "config", "configuration"),
    [
        ("EncoderDecoderModel", {"encoder": 3, "decoder": 3}, "EncoderDecoderConfig"),
        ("MusicgenForConditionalGeneration", {"text_encoder": 3}, "MusicgenConfig"),
        ("MusicgenForConditionalGeneration", {"text_encoder": {"d_model": "wide"}}, "MusicgenConfig"),
    ],
)
def test_a_model_of_others_without_their_configurations_is_a_workload_error(
    class_name: str, config: dict[str, Any], configuration: str
) -> None:
    with pytest.raises(WorkloadError, match=rf"model\.config: {configuration} refuses these values") as refused:
        build_model(Workload.from_mapping({"model": {"class": class_name, "config": config}}))
    assert re.search(
        r"^[^\n]*\. Give others in model\.config, or install the release of transformers .*\)$", str(refused.value)
    )


def test_parts_of_different_width_are_named() -> None:
    workload = Workload.from_mapping({"model": {"class": "Qwen2VLForConditionalGeneration"}})
    with torch.device("meta"):
        model = build_model(workload)
    with pytest.raises(WorkloadError, match=r"vision_config\.hidden_size: 3584 must equal .* 8192"):
        build_batch(workload, model)


_SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
_BART = {
    "model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 200,
}  # fmt: skip
_IDEFICS3 = {
    "text_config": _LLAMA, "vision_config": _VIT, "scale_factor": 2, "image_token_id": 150, "pad_token_id": 0,
}  # fmt: skip
_SWIN = {
    "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "image_size": 64,
    "out_indices": [2, 3, 4],
}  # fmt: skip
_SERIES = {"context_length": 32, "num_input_channels": 3, "num_targets": 2, "patch_length": 8, "d_model": 16}
_TRAINED: dict[str, dict[str, Any]] = {
    "Idefics2ForConditionalGeneration": _IDEFICS2,
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Florence2ForConditionalGeneration": {
        "text_config": _BART, "image_token_id": 150,
        "vision_config": {
            "depths": [1, 1, 1, 1], "embed_dim": [8, 8, 16, 16], "num_heads": [1, 1, 2, 2], "num_groups": [1, 1, 2, 2],
            "projection_dim": 32,
        },
    },
    "LxmertForQuestionAnswering": {
        **_BERT, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 24, "num_qa_labels": 11,
    },
    "VisualBertForQuestionAnswering": {**_BERT, "visual_embedding_dim": 24, "num_labels": 11},
    "PerceiverForSequenceClassification": {
        "d_model": 16, "d_latents": 16, "num_latents": 4, "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2, "max_position_embeddings": 48, "vocab_size": 60,
    },
    "PatchTSTForRegression": _SERIES,
    "PatchTSTForClassification": _SERIES,
    "PatchTSMixerForRegression": {**_SERIES, "patch_stride": 8},
    "TimesFmModelForPrediction": {
        "patch_length": 8, "context_length": 32, "horizon_length": 8, "hidden_size": 32, "intermediate_size": 32,
        "head_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    },
    "DeepseekVLForConditionalGeneration": {
        "text_config": _LLAMA, "vision_config": {**_SMALL, "image_size": 32, "patch_size": 8}, "image_token_id": 150,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _TRAINED)
def test_a_family_is_trained_on_the_cpu_and_in_a_simulation(
    describe: Callable[..., Workload], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("Florence2"):
        monkeypatch.setattr(Shape, "image_size", (3, 64, 64))
    workload = describe(name, model={"config": copy.deepcopy(_TRAINED[name])}, data={}, steps=1)
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


def test_the_image_of_florence_has_the_tokens_of_its_processor(describe: Callable[..., Workload]) -> None:
    """Check ``image_seq_length`` of its checkpoints, 577; the text has what is left of 1024 positions."""
    workload = describe(name := "Florence2ForConditionalGeneration", model={"config": _TRAINED[name]}, data={})
    with torch.device("meta"):
        model = build_model(workload)
    batch = build_batch(workload, model)
    assert batch["pixel_values"].shape == (2, 3, 768, 768)
    assert (batch["input_ids"] == 150).sum() == 2 * 577 and batch["input_ids"].shape == (2, 1024)


def test_a_placeholder_beyond_the_vocabulary_is_refused(describe: Callable[..., Workload]) -> None:
    config = {**_TRAINED[name := "DeepseekVLForConditionalGeneration"], "image_token_id": 200}
    workload = describe(name, model={"config": config}, data={})
    with pytest.raises(
        WorkloadError, match=r"token 200 of Deepseek.* is not below the vocab_size of its text part, 200"
    ):
        build_batch(workload, build_model(workload))


def test_a_detector_of_phrases_reads_a_text_of_phrases(
    describe: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check Grounding DINO, whose loss compares boxes with the tokens of a phrase, and takes at most 256 tokens."""
    pytest.importorskip("scipy")
    monkeypatch.setattr(Shape, "image_size", (3, 64, 64))
    config = {
        "text_config": {"model_type": "bert", **_BERT, "vocab_size": 1100}, "backbone_config": _SWIN, "d_model": 32,
        "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 20, "num_labels": 3,
    }  # fmt: skip
    workload = describe("GroundingDinoForObjectDetection", model={"config": config}, data={"sequence_length": 12})
    batch = build_batch(workload, build_model(workload))
    assert batch["input_ids"][0, [0, 2, 4, 11]].tolist() == [101, 1012, 1012, 102]
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps >= 1
    with pytest.raises(WorkloadError, match="longer than the 256 positions"):
        longer = describe("GroundingDinoForObjectDetection", model={"config": config}, data={"sequence_length": 300})
        build_batch(longer, build_model(longer))


def test_the_image_of_a_detector_with_windows_is_divisible_into_them(describe: Callable[..., Workload]) -> None:
    """Check RF-DETR: 100 pixels are no multiple of 4 windows of patches of 14."""
    backbone = {
        "model_type": "rf_detr_dinov2", "hidden_size": 32, "num_hidden_layers": 12, "num_attention_heads": 2,
        "image_size": 100, "patch_size": 14, "num_windows": 4,
    }  # fmt: skip
    workload = describe("RfDetrForObjectDetection", model={"config": {"backbone_config": backbone}})
    with torch.device("meta"):
        model = build_model(workload)
    assert build_batch(workload, model)["pixel_values"].shape == (2, 3, 112, 112)
