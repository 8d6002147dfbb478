"""Samples whose images or recordings differ in size: their batches, and models that are trained on them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from training.test_images import FAMILIES

from trainatomy.errors import WorkloadError
from trainatomy.reporters.subject_sentences import fullest_batch
from trainatomy.results.lengths import FullestBatch, Unit
from trainatomy.simulator.lengths import stand_ins_of
from trainatomy.training.batch import build_dataset
from trainatomy.training.labels import IGNORED
from trainatomy.training.lengths import BatchShape, LengthBatch, orders
from trainatomy.training.model import build_model
from trainatomy.training.positions import Lengths
from trainatomy.training.samples import media_of
from trainatomy.training.shape import Shape
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from torch import nn

RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"],
}  # fmt: skip
DETR = {
    "backbone_config": RESNET, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 8,
}  # fmt: skip
HEARING = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 30,
    "conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
}  # fmt: skip
SIZES = {"64x64": 3, "32x64": 2, "96x32": 1}
SEEING = (
    "Qwen2VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "LlavaForConditionalGeneration of Pixtral",
)


def described(name: str, config: dict[str, Any], lengths: Any, **more: Any) -> Workload:
    train = {"per_device_train_batch_size": 3, "train_sampling_strategy": "sequential"}
    data = {"lengths": lengths, **more}
    return Workload.from_mapping({"model": {"class": name.split()[0], "config": config}, "data": data, "train": train})


def trained(workload: Workload) -> tuple[nn.Module, dict[str, Any], LengthBatch]:
    """Run a step on the first batch of an epoch; return the model, the batch and what it is made of."""
    model = build_model(workload).train()
    dataset = build_dataset(workload, model, 6)
    batch = dataset.collate([{}] * 3)
    model(**batch).loss.backward()
    _, samples = media_of(workload, model)
    return model, batch, orders(workload, samples, count=1)[0].steps[0][0]


@pytest.mark.parametrize("name", SEEING)
def test_models_that_see_are_trained_on_images_of_different_sizes(name: str) -> None:
    workload = described(name, FAMILIES[name], SIZES)
    model, batch, made = trained(workload)
    assert any(parameter.grad is not None for parameter in model.parameters())
    assert batch["input_ids"].shape == (3, made.padded)
    assert batch["attention_mask"].sum(1).tolist() == list(made.lengths)
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_recordings_are_padded_to_the_longest_beside_a_mask_where_the_extractor_gives_one(norm: str) -> None:
    config = {**HEARING, "feat_extract_norm": norm}
    _, batch, made = trained(described("Wav2Vec2ForCTC", config, ["1s", "0.5s", "0.8s"]))
    assert batch["input_values"].shape == (3, 16_000)
    assert batch["input_values"][1, 8_000:].eq(0).all()
    assert ("attention_mask" in batch) == (norm == "layer")
    assert norm == "group" or batch["attention_mask"].sum(1).tolist() == [16_000, 8_000, 12_800]
    assert (batch["labels"] != IGNORED).sum(1).tolist() == [15, 8, 12]  # 150 letters in 10 seconds
    assert made.shape == BatchShape(3, 16_000, True, 36_800)


def test_detectors_get_the_largest_height_and_width_of_a_batch_and_a_mask() -> None:
    workload = described("DetrForObjectDetection", DETR, ["60x100", "100x60", "80x80"], image_limits=[32, 48])
    _, batch, made = trained(workload)
    assert batch["pixel_values"].shape == (3, 3, 48, 48)
    assert batch["pixel_mask"].sum((1, 2)).tolist() == [29 * 48, 48 * 29, 32 * 32] == list(made.lengths)
    assert made.shape == BatchShape(3, 48 * 48, True, samples=((48, 48),))


def test_a_batch_that_no_other_covers_is_executed_itself() -> None:
    workload = described("DetrForObjectDetection", DETR, {"60x100": 6, "100x60": 6, "80x80": 6}, image_limits=[32, 48])
    wide, high, small = (BatchShape(3, prod(side), True, samples=(side,)) for side in ((32, 48), (48, 32), (32, 32)))
    assert not wide.covers(high)
    made = [LengthBatch((1, 2, 3), prod(shape.samples[0]), side=shape.samples[0]) for shape in (wide, high, small)]
    few = workload.replace({"data.lengths.shapes": 1})
    chosen = stand_ins_of(few, orders_of(made))
    assert chosen[wide] == wide
    assert chosen[high] == high
    assert chosen[small] in (wide, high)


def orders_of(batches: list[LengthBatch]) -> list[Any]:
    from trainatomy.training.lengths import Order

    return [Order(0, tuple((batch,) for batch in batches))]


@pytest.mark.parametrize(
    ("name", "config", "lengths", "more", "message"),
    [
        ("ViTForImageClassification", {}, SIZES, {}, "how ViTForImageClassification joins images of several sizes"),
        ("BertForMaskedLM", {}, SIZES, {}, "data.lengths: BertForMaskedLM takes no images"),
        ("BertForMaskedLM", {}, ["5s"], {}, "BertForMaskedLM hears no recordings"),
        ("WhisperForConditionalGeneration", {}, ["5s"], {}, "hears recordings of one length"),
        ("Wav2Vec2ForCTC", {"layerdrop": 0.1}, ["5s"], {}, "model.config.layerdrop: leaves out layers at random"),
        ("Gemma3ForConditionalGeneration", None, SIZES, {}, "resizes every image to 32 × 32"),
        (
            "Qwen2VLForConditionalGeneration",
            None,
            {"640x640": 3},
            {"sequence_length": 64},
            "sequence_length: 64 tokens",
        ),
        ("LlavaNextForConditionalGeneration", None, SIZES, {"image_limits": [9, 99]}, "image_limits: the processor of"),
    ],
)
def test_what_does_not_differ_or_is_not_known_to_is_refused(
    name: str, config: dict[str, Any] | None, lengths: Any, more: dict[str, Any], message: str
) -> None:
    workload = described(name, FAMILIES[name] if config is None else config, lengths, **more)
    with torch.device("meta"):
        model = build_model(workload)
    with pytest.raises(WorkloadError, match=message.replace("[", r"\[")):
        media_of(workload, model)


def test_images_are_resized_by_their_edges_as_transformers_does() -> None:
    from random import Random

    from transformers import AutoConfig
    from transformers.image_transforms import get_size_with_aspect_ratio

    draw, config = Random(3), AutoConfig.for_model("detr")
    for _ in range(200):
        size = (draw.randint(20, 3000), draw.randint(20, 3000))
        shape = Shape("Detr", config, frozenset({"pixel_values", "pixel_mask"}), "pixel_values", Lengths(0, 0), 1, size)
        assert shape.image_size[1:] == get_size_with_aspect_ratio(size, 800, 1333)


@pytest.mark.parametrize(
    ("batch", "unit", "said"),
    [
        (FullestBatch(6, 2, 1881, (1881, 576), ((1024, 1024), (224, 224))), "tokens",
         "2 rows of 1,881 tokens (images of 1024 × 1024, 224 × 224), in step 7."),
        (FullestBatch(0, 2, 480_000, (480_000, 40_000)), "audio samples",
         "2 rows of 30.0 seconds of audio (samples of 30.0, 2.5), in step 1."),
        (FullestBatch(0, 9, 341 * 400, (1,) * 9, ((640, 480),) * 9, (341, 400)), "pixels",
         f"9 images padded to 341 × 400 (images of {'640 × 480, ' * 8}".removesuffix(", ")
         + " and 1 smaller ones), in step 1."),
    ],
)  # fmt: skip
def test_the_largest_batch_is_named(batch: FullestBatch, unit: Unit, said: str) -> None:
    assert f"The fullest batch of that order has {said} To see early" in fullest_batch(batch, unit)
