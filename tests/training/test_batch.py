"""The batches: their content for each model family and the limits of the model, without building a full model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.simulator.simulate import simulate
from trainatomy.training.batch import build_batch, build_dataset
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from pathlib import Path

TEXT = {"input_ids": ((2, 16), torch.int64)}
TOKENS = {"labels": ((2, 16), torch.int64)}
CLASS = {"labels": ((2,), torch.int64)}

EXPECTED: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": {**TEXT, **CLASS},
    "BertForMaskedLM": {**TEXT, **TOKENS},
    "BertForTokenClassification": {**TEXT, **TOKENS},
    "BertForQuestionAnswering": {
        **TEXT, "start_positions": ((2,), torch.int64), "end_positions": ((2,), torch.int64),
    },
    "RobertaForSequenceClassification": {**TEXT, **CLASS},
    "GPT2LMHeadModel": {**TEXT, **TOKENS},
    "LlamaForCausalLM": {**TEXT, **TOKENS},
    "LlamaForSequenceClassification": {**TEXT, **CLASS},
    "GemmaForCausalLM": {**TEXT, **TOKENS},
    "MixtralForCausalLM": {**TEXT, **TOKENS},
    "T5ForConditionalGeneration": {**TEXT, "labels": ((2, 8), torch.int64)},
    "BartForConditionalGeneration": {**TEXT, "labels": ((2, 8), torch.int64)},
    "WhisperForConditionalGeneration": {
        "input_features": ((2, 80, 100), torch.float32), "labels": ((2, 8), torch.int64),
    },
    "ViTForImageClassification": {"pixel_values": ((2, 3, 32, 32), torch.float32), **CLASS},
    "ResNetForImageClassification": {"pixel_values": ((2, 3, 224, 224), torch.float32), **CLASS},
    "CLIPModel": {**TEXT, "pixel_values": ((2, 3, 32, 32), torch.float32)},
}  # fmt: skip


def batch_of(workload: Workload) -> dict[str, Any]:
    with torch.device("meta"):
        model = build_model(workload)
    return build_batch(workload, model)


def shapes(batch: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


_TEXT_32 = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_VIDEO = {**_TEXT_32, "image_size": 32, "patch_size": 16, "num_frames": 4}
_LLAVA = {
    "text_config": {"model_type": "llama", **_TEXT_32, "vocab_size": 200},
    "vision_config": {"model_type": "clip_vision_model", **_TEXT_32, "image_size": 32, "patch_size": 8},
    "image_seq_length": 16,
    "image_token_id": 150,
}
OTHER_HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BertForMultipleChoice": (_TEXT_32, {"input_ids": ((2, 4, 16), torch.int64), **CLASS}),
    "LayoutLMForTokenClassification": (_TEXT_32, {**TEXT, "bbox": ((2, 16, 4), torch.int64), **TOKENS}),
    "SegformerForSemanticSegmentation": (
        {},
        {"pixel_values": ((2, 3, 224, 224), torch.float32), "labels": ((2, 224, 224), torch.int64)},
    ),
    "VideoMAEForVideoClassification": (_VIDEO, {"pixel_values": ((2, 4, 3, 32, 32), torch.float32), **CLASS}),
    "VideoMAEForPreTraining": (
        {**_VIDEO, "tubelet_size": 2},
        {"pixel_values": ((2, 4, 3, 32, 32), torch.float32), "bool_masked_pos": ((2, 8), torch.bool)},
    ),
    "ViTMAEForPreTraining": (
        {**_TEXT_32, "image_size": 32, "patch_size": 16},
        {"pixel_values": ((2, 3, 32, 32), torch.float32)},
    ),
    "ViTForMaskedImageModeling": (
        {**_TEXT_32, "image_size": 32, "patch_size": 16},
        {"pixel_values": ((2, 3, 32, 32), torch.float32), "bool_masked_pos": ((2, 4), torch.bool)},
    ),
    "PatchTSTForPrediction": (
        {"context_length": 32, "prediction_length": 8, "num_input_channels": 3},
        {"past_values": ((2, 32, 3), torch.float32), "future_values": ((2, 8, 3), torch.float32)},
    ),
    "TimeSeriesTransformerForPrediction": (
        {"context_length": 16, "prediction_length": 8, "lags_sequence": [1, 5], "num_time_features": 2}
        | {"num_static_categorical_features": 2, "cardinality": [3, 4], "d_model": 32, "input_size": 3},
        {
            "past_values": ((2, 21, 3), torch.float32),
            "past_time_features": ((2, 21, 2), torch.float32),
            "past_observed_mask": ((2, 21, 3), torch.float32),
            "static_categorical_features": ((2, 2), torch.int64),
            "future_values": ((2, 8, 3), torch.float32),
            "future_time_features": ((2, 8, 2), torch.float32),
        },
    ),
    "AutoformerForPrediction": (
        {"context_length": 16, "prediction_length": 8, "num_time_features": 1, "d_model": 32},
        {
            "past_values": ((2, 23), torch.float32),
            "past_time_features": ((2, 23, 1), torch.float32),
            "past_observed_mask": ((2, 23), torch.float32),
            "future_values": ((2, 8), torch.float32),
            "future_time_features": ((2, 8, 1), torch.float32),
        },
    ),
    "Speech2TextForConditionalGeneration": (
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 60},
        {"input_features": ((2, 60, 80), torch.float32), "labels": ((2, 8), torch.int64)},
    ),
    "ASTForAudioClassification": (
        {**_TEXT_32, "max_length": 64},
        {"input_values": ((2, 64, 128), torch.float32), **CLASS},
    ),
    "Wav2Vec2ForCTC": (
        {**_TEXT_32, "vocab_size": 32},
        {"input_values": ((2, 160_000), torch.float32), "labels": ((2, 8), torch.int64)},
    ),
    "TapasForQuestionAnswering": (_TEXT_32, {**TEXT, **TOKENS}),
    "ViltForQuestionAnswering": (
        {**_TEXT_32, "image_size": 32, "patch_size": 16, "num_labels": 5},
        {**TEXT, "pixel_values": ((2, 3, 32, 32), torch.float32), "labels": ((2, 5), torch.float32)},
    ),
    "LlavaForConditionalGeneration": (
        _LLAVA,
        {
            "input_ids": ((2, 32), torch.int64),
            "pixel_values": ((2, 3, 32, 32), torch.float32),
            "labels": ((2, 32), torch.int64),
        },
    ),
}


@pytest.mark.parametrize("name", list(OTHER_HEADS))
def test_a_batch_holds_what_the_head_takes(describe: Any, name: str) -> None:
    config, expected = OTHER_HEADS[name]
    assert shapes(batch_of(describe(name, model={"config": config}))) == expected


_FRAMES = {
    **_TEXT_32,
    "num_labels": 3,
    "feature_projection_input_dim": 8,
    "adapter_stride": 2,
    "conv_depthwise_kernel_size": 3,
}
_CONFORMER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_PIX2STRUCT_PART = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
}
OTHER_INPUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Wav2Vec2BertForAudioFrameClassification": (
        _FRAMES,
        {"input_features": ((2, 500, 8), torch.float32), "labels": ((2, 500, 3), torch.float32)},
    ),
    "Wav2Vec2ForAudioFrameClassification": (
        {**_TEXT_32, "num_labels": 3, "conv_dim": [8, 8], "conv_kernel": [400, 4], "conv_stride": [320, 2]},
        {"input_values": ((2, 160_000), torch.float32), "labels": ((2, 248, 3), torch.float32)},
    ),
    "ParakeetForCTC": (
        {"encoder_config": {**_CONFORMER, "num_mel_bins": 16}, "vocab_size": 32, "pad_token_id": 0},
        {
            "input_features": ((2, 1000, 16), torch.float32),
            "attention_mask": ((2, 1000), torch.int64),
            "labels": ((2, 8), torch.int64),
        },
    ),
    "VJEPA2ForVideoClassification": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "crop_size": 32,
            "pred_hidden_size": 32,
            "pred_num_hidden_layers": 1,
            "pred_num_attention_heads": 2,
            "frames_per_clip": 4,
            "num_pooler_layers": 1,
            "num_labels": 2,
        },
        {"pixel_values_videos": ((2, 4, 3, 32, 32), torch.float32), **CLASS},
    ),
    "Siglip2ForImageClassification": (
        {"vision_config": {**_TEXT_32, "num_patches": 16, "patch_size": 4}},
        {
            "pixel_values": ((2, 16, 48), torch.float32),
            "pixel_attention_mask": ((2, 16), torch.int64),
            "spatial_shapes": ((2, 2), torch.int64),
            **CLASS,
        },
    ),
    "CanineForSequenceClassification": ({**_TEXT_32, "num_hash_buckets": 64}, {**TEXT, **CLASS}),
    "Pix2StructForConditionalGeneration": (
        {
            "vision_config": {**_PIX2STRUCT_PART, "patch_embed_hidden_size": 12, "d_ff": 32, "d_kv": 16},
            "text_config": {**_PIX2STRUCT_PART, "d_ff": 32, "d_kv": 16, "vocab_size": 64},
        },
        {"flattened_patches": ((2, 2048, 14), torch.float32), "labels": ((2, 8), torch.int64)},
    ),
}


@pytest.mark.parametrize("name", list(OTHER_INPUTS))
def test_a_model_of_frames_patches_or_characters_is_trained_and_its_step_predicted(describe: Any, name: str) -> None:
    config, expected = OTHER_INPUTS[name]
    workload = describe(name, model={"config": config}, steps=1)
    assert shapes(batch_of(workload)) == expected
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 50, "eos_token_id": 7}  # fmt: skip


def test_texts_of_classifying_encoder_decoders_end_with_eos(describe: Any) -> None:
    workload = describe("BartForSequenceClassification", model={"config": _BART}, steps=1)
    ends = batch_of(workload)["input_ids"] == 7
    assert ends[:, -1].all() and not ends[:, :-1].any()
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


def test_a_question_is_separated_from_its_context(describe: Any) -> None:
    config = {**_TEXT_32, "attention_window": 4, "vocab_size": 50, "sep_token_id": 2}
    workload = describe("LongformerForQuestionAnswering", model={"config": config}, steps=1)
    assert ((batch_of(workload)["input_ids"] == 2).nonzero()[:, 1]).tolist() == [4, 5, 15] * 2
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


def test_images_of_any_size_come_with_their_sizes(describe: Any) -> None:
    config = {**_LLAVA, "spatial_merge_size": 2, "vision_feature_layer": -1}
    config = {k: v for k, v in config.items() if k != "image_seq_length"}
    config["vision_config"] = {"model_type": "pixtral", **_TEXT_32, "image_size": 32, "patch_size": 8}
    config["vision_config"]["head_dim"] = 16
    workload = describe("Mistral3ForConditionalGeneration", model={"config": config}, steps=1)
    batch = batch_of(workload)
    assert batch["image_sizes"].tolist() == [[32, 32]] * 2
    assert (batch["input_ids"] == 150).sum() == 2 * 4
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


_QWEN = {
    "text_config": {**_TEXT_32, "num_key_value_heads": 1, "vocab_size": 200, "head_dim": 16,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32,
                      "patch_size": 14, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    "image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153,
}  # fmt: skip
_QWEN_2_5 = {
    **_QWEN,
    "vision_config": {
        **{
            k: v
            for k, v in _QWEN["vision_config"].items()
            if k not in ("deepstack_visual_indexes", "num_position_embeddings")
        },
        "fullatt_block_indexes": [1],
    },
}


def test_images_become_one_row_of_patches(describe: Any) -> None:
    """Check a 224 × 224 image: 16 × 16 patches of 14 × 14, 2 × 2 of them per token, as in Qwen2-VL's processor."""
    batch = batch_of(describe("Qwen3VLForConditionalGeneration", model={"config": _QWEN}))
    tokens = ((2, 64 + 16), torch.int64)
    assert shapes(batch) == {
        "input_ids": tokens, "labels": tokens, "mm_token_type_ids": tokens,
        "pixel_values": ((2 * 256, 3 * 2 * 14 * 14), torch.float32), "image_grid_thw": ((2, 3), torch.int64),
    }  # fmt: skip
    assert batch["image_grid_thw"].tolist() == [[1, 16, 16]] * 2
    assert (batch["input_ids"] == 150).sum() == 2 * 64


@pytest.mark.parametrize("loop", ["pytorch", "trainer"])
@pytest.mark.parametrize(
    ("name", "config"), [("Qwen3VLForConditionalGeneration", _QWEN), ("Qwen2_5_VLForConditionalGeneration", _QWEN_2_5)]
)
def test_a_model_of_patches_is_trained_and_its_step_predicted(describe: Any, name: str, config: Any, loop: str) -> None:
    workload = describe(name, model={"config": config}, loop=loop, steps=1)
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


def test_patches_are_merged_into_tokens(describe: Any) -> None:
    """Check that Aya Vision's ``downsample_factor`` applies to each side, not to the number of tokens."""
    config = {**_LLAVA, "downsample_factor": 2, "image_token_index": 150}
    config = {k: v for k, v in config.items() if k not in ("image_seq_length", "image_token_id")}
    config["vision_config"] = {**_LLAVA["vision_config"], "model_type": "siglip_vision_model"}
    batch = batch_of(describe("AyaVisionForConditionalGeneration", model={"config": config}))
    assert (batch["input_ids"] == 150).sum() == 2 * (32 // 8 // 2) ** 2


_DETR = {
    "d_model": 32, "encoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 10, "num_labels": 5,
    "backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
                        "out_features": ["stage2"]},
}  # fmt: skip


def test_each_image_has_its_own_objects(describe: Any) -> None:
    """Check for a list with one dict per image, the ``labels`` of ``DetrForObjectDetection.forward``."""
    batch = batch_of(describe("DetrForObjectDetection", model={"config": _DETR}))
    assert shapes(batch) == {"pixel_values": ((2, 3, 640, 640), torch.float32)}
    found = [shapes(objects) for objects in batch["labels"]]
    assert found == [{"class_labels": ((7,), torch.int64), "boxes": ((7, 4), torch.float32)}] * 2
    boxes = batch["labels"][0]["boxes"]
    assert (boxes > 0).all() and (boxes < 1).all()
    assert batch["labels"][0]["class_labels"].max() < 5


@pytest.mark.parametrize("loop", ["pytorch", "trainer"])
def test_a_detector_is_trained_and_its_step_predicted(describe: Any, loop: str) -> None:
    """Check the matching of objects to queries, which SciPy does on the CPU."""
    pytest.importorskip("scipy")
    workload = describe("DetrForObjectDetection", model={"config": _DETR}, loop=loop, steps=1)
    run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


def test_each_image_has_its_own_segments(describe: Any) -> None:
    """Check for two lists with one tensor per image, as in ``Mask2FormerForUniversalSegmentation.forward``."""
    pytest.importorskip("scipy")  # its loss matches segments with it
    backbone = {"model_type": "swin", "depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    config = {"encoder_layers": 1, "decoder_layers": 2, "backbone_config": backbone}
    batch = batch_of(describe("Mask2FormerForUniversalSegmentation", model={"config": config}))
    assert [tuple(mask.shape) for mask in batch["mask_labels"]] == [(7, *batch["pixel_values"].shape[-2:])] * 2
    assert [(tuple(one.shape), one.dtype) for one in batch["class_labels"]] == [((7,), torch.int64)] * 2


def test_an_image_precedes_the_text_and_is_not_a_label(describe: Any) -> None:
    batch = batch_of(describe("LlavaForConditionalGeneration", model={"config": _LLAVA}))
    is_image = batch["input_ids"] == 150
    assert is_image[:, :16].all() and not is_image[:, 16:].any()
    assert torch.equal(batch["labels"] == -100, is_image)


def test_a_batch_holds_what_the_family_takes(describe: Any, family: str) -> None:
    batch = batch_of(describe(family))
    assert shapes(batch) == EXPECTED[family]
    assert all(value.device.type == "cpu" for value in batch.values() if isinstance(value, torch.Tensor))


def test_tokens_stay_in_the_guides_range_and_in_the_vocabulary(describe: Any) -> None:
    tokens = batch_of(describe("LlamaForCausalLM"))["input_ids"]
    assert tokens.min() >= 100
    assert tokens.max() < 200
    small = batch_of(describe("LlamaForCausalLM", model={"config": {"vocab_size": 50, "hidden_size": 32}}))
    assert small["input_ids"].max() < 50


def test_samples_are_drawn_from_their_index(describe: Any) -> None:
    workload = describe()
    with torch.device("meta"):
        model = build_model(workload)
    dataset = build_dataset(workload, model, 10**9)  # cheap: samples are drawn on demand
    assert len(dataset) == 10**9
    assert torch.equal(dataset[5]["input_ids"], dataset[5]["input_ids"])
    assert not torch.equal(dataset[5]["input_ids"], dataset[6]["input_ids"])


def test_samples_of_two_steps_repeat_within_the_memory_bound(describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = describe("ViTForImageClassification", train={"gradient_accumulation_steps": 3})
    with torch.device("meta"):
        model = build_model(workload)
    dataset = build_dataset(workload, model, 100)
    assert dataset[0] is dataset[12] and dataset[3] is dataset[15]
    assert not torch.equal(dataset[0]["pixel_values"], dataset[6]["pixel_values"])
    size = sum(value.nbytes for value in dataset[0].values())
    monkeypatch.setattr("trainatomy.training.batch.POOL_BYTES", 2 * size)
    small = build_dataset(workload, model, 100)
    assert len({id(small[index]) for index in range(100)}) == 2


def test_of_large_batches_only_the_first_samples_are_drawn(describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainatomy.training.batch.POOL_SAMPLES", 8)
    workload = describe(train={"per_device_train_batch_size": 20})
    with torch.device("meta"):
        model = build_model(workload)
    dataset = build_dataset(workload, model, 100)
    assert len({id(dataset[index]) for index in range(100)}) == 8
    assert dataset.collate([dataset[index] for index in range(20)])["input_ids"].shape[0] == 20


def test_masks_and_padding_are_optional(describe: Any) -> None:
    plain = {"sequence_length": 16}
    masked = batch_of(describe("LlamaForCausalLM", data={**plain, "attention_mask": True}))
    assert masked["attention_mask"].all()
    padded = batch_of(describe("LlamaForCausalLM", data={**plain, "padding": True}))
    assert padded["attention_mask"].sum() == 2 * 12
    assert torch.equal(padded["labels"] == -100, padded["attention_mask"] == 0)


@pytest.mark.parametrize(
    ("train", "dtype"),
    [({}, torch.bfloat16), ({"bf16": True}, torch.float32), ({"fp16": True, "max_grad_norm": 0}, torch.float32)],
)
def test_images_follow_weights_of_16_bits_unless_autocast_casts(describe: Any, train: Any, dtype: torch.dtype) -> None:
    workload = describe("ViTForImageClassification", model={"dtype": "bfloat16"}, train=train)
    assert batch_of(workload)["pixel_values"].dtype == dtype


@pytest.mark.parametrize(
    ("config", "shape", "dtype"),
    [
        ({"num_labels": 1}, (2,), torch.float32),
        ({"num_labels": 5, "problem_type": "multi_label_classification"}, (2, 5), torch.float32),
    ],
)
def test_labels_follow_the_problem(describe: Any, config: Any, shape: Any, dtype: torch.dtype) -> None:
    labels = batch_of(describe(model={"config": config}))["labels"]
    assert (tuple(labels.shape), labels.dtype) == (shape, dtype)


def test_inference_has_no_labels_and_feeds_its_decoder(describe: Any) -> None:
    assert shapes(batch_of(describe(mode="inference"))) == TEXT
    decoder = batch_of(
        describe("T5ForConditionalGeneration", mode="inference", train={"per_device_eval_batch_size": 3})
    )
    assert shapes(decoder) == {"input_ids": ((3, 16), torch.int64), "decoder_input_ids": ((3, 8), torch.int64)}


def test_a_factory_makes_the_batch(describe: Any, tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(
        "import torch\n\n\ndef batch(size):\n    return {'input_ids': torch.ones(size, 3, dtype=torch.long)}\n\n\n"
        "def wrong(size):\n    return [size]\n\n\ndef broken(size):\n    return {}['x']\n\n\n"
        "def long(size, length=3):\n    return {'input_ids': torch.ones(size, length, dtype=torch.long)}\n"
    )
    assert shapes(batch_of(describe(data={"factory": f"{file}:batch"}))) == {"input_ids": ((2, 3), torch.int64)}
    long = describe(data={"factory": f"{file}:long", "factory_arguments": {"length": 5}})
    assert shapes(batch_of(long)) == {"input_ids": ((2, 5), torch.int64)}
    with pytest.raises(
        FactoryError, match=r"is called with the batch size and width, but its signature is \(size, length"
    ):
        batch_of(describe(data={"factory": f"{file}:long", "factory_arguments": {"width": 5}}))
    with pytest.raises(FactoryError, match="must be a dict of tensors, not list"):
        batch_of(describe(data={"factory": f"{file}:wrong"}))
    with pytest.raises(FactoryError, match=r"user\.py:13, in broken"):
        batch_of(describe(data={"factory": f"{file}:broken"}))


def test_a_model_without_configuration_needs_a_factory_for_its_data(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(2, 2)\n")
    with pytest.raises(WorkloadError, match=r"data\.factory: Linear"):
        batch_of(Workload.from_mapping({"model": {"factory": f"{file}:build"}}))


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_label_smoothing_keeps_the_decoder_inputs(describe: Any, name: str) -> None:
    train = {"label_smoothing_factor": 0.1}
    batch = batch_of(describe(name, train=train))
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])
    assert "decoder_input_ids" not in batch_of(describe(name))
    assert "decoder_input_ids" not in batch_of(describe("GPT2LMHeadModel", train=train))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification", "CLIPModel"])
def test_a_batch_that_fills_no_gpu_takes_no_host_memory(
    describe: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One sample stands for all: the shapes are those of any batch, and every row is the same memory."""
    whole = batch_of(describe(name))
    monkeypatch.setattr("trainatomy.training.batch.LARGEST_BATCH_BYTES", 1)
    repeated = batch_of(describe(name))
    assert shapes(repeated) == shapes(whole)
    assert all(value.stride(0) == 0 for value in repeated.values() if isinstance(value, torch.Tensor))
    many = batch_of(describe(name, train={"per_device_train_batch_size": 1_000_000}))
    assert {value.shape[0] for value in many.values() if isinstance(value, torch.Tensor)} == {1_000_000}


def test_repeated_samples_are_predicted_as_others(describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = describe("LlamaForCausalLM", train={"per_device_train_batch_size": 8}, steps=2)
    sizes = []
    for limit in (2**30, 1):
        monkeypatch.setattr("trainatomy.training.batch.LARGEST_BATCH_BYTES", limit)
        trace = simulate(workload, workload.resolve_gpu()).trace
        sizes.append([event.bytes for event in trace.events])
    assert sizes[0] == sizes[1]


def test_more_samples_than_can_be_joined_are_refused(describe: Any) -> None:
    with pytest.raises(WorkloadError, match="is too large for any GPU: 10,000,000 samples"):
        describe("ResNetForImageClassification", train={"per_device_train_batch_size": 10_000_000}, data={})


def test_rows_are_rounded_up_with_tokens_that_the_mask_leaves_out() -> None:
    model = {"class": "LlamaForCausalLM", "config": {**_TEXT_32, "vocab_size": 200}}
    data = {"sequence_length": 13, "pad_to_multiple_of": 8}
    batch = batch_of(Workload.from_mapping({"model": model, "data": data}))
    assert batch["attention_mask"][0].tolist() == [1] * 13 + [0] * 3
    assert batch["labels"][0, 13:].tolist() == [-100] * 3
    whole = batch_of(Workload.from_mapping({"model": model, "data": {**data, "sequence_length": 16}}))
    assert whole["attention_mask"].all()
