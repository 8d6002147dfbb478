"""The images of a sample: what processors make of their size, the tokens that stand for them, and what is assumed."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainatomy.catalog.versions import parse_version
from trainatomy.errors import WorkloadError
from trainatomy.simulator.notes import sample_notes
from trainatomy.simulator.simulate import simulate
from trainatomy.training.batch import build_batch
from trainatomy.training.image_layout import _PIXELS, rule_of
from trainatomy.training.model import build_model
from trainatomy.training.positions import Lengths
from trainatomy.training.shape import Shape, shape_of
from trainatomy.workload.overrides import merge
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import sweep

if TYPE_CHECKING:
    from collections.abc import Callable

_PART = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = {**_PART, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 200, "head_dim": 16}
_VISION = {**_PART, "image_size": 32, "patch_size": 8}
_SIGLIP = {"text_config": _TEXT, "vision_config": {**_VISION, "model_type": "siglip_vision_model"}}
_PIXTRAL = {"text_config": _TEXT, "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16}}
_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TILED = {"scale_factor": 2, "image_token_id": 150, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "qwen2_vl_text", "rope_parameters": _ROPE},
        "vision_config": {"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": 32},
        "image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153,
    },
    "Glm4vForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "glm4v_text", "rope_parameters": _ROPE},
        "vision_config": {
            "depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32,
        },
        "image_token_id": 150, "video_token_id": 151,
    },
    "LlavaForConditionalGeneration": {
        "text_config": _TEXT, "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_token_index": 150, "image_seq_length": 16,
    },
    "LlavaNextForConditionalGeneration": {
        "text_config": _TEXT, "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "image_token_index": 150, **_PINPOINTS,
    },
    "LlavaOnevisionForConditionalGeneration": {**_SIGLIP, "image_token_index": 150, **_PINPOINTS},
    "Idefics3ForConditionalGeneration": {"text_config": _TEXT, "vision_config": _VISION, **_TILED},
    "SmolVLMForConditionalGeneration": {"text_config": _TEXT, "vision_config": _VISION, **_TILED},
    "PaliGemmaForConditionalGeneration": {
        **_SIGLIP, "text_config": {**_TEXT, "model_type": "gemma"}, "image_token_index": 150, "projection_dim": 32,
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "gemma3_text"}, "vision_config": _SIGLIP["vision_config"],
        "image_token_index": 150, "boi_token_index": 151, "eoi_token_index": 152, "mm_tokens_per_image": 4,
    },
    "MllamaForConditionalGeneration": {
        "text_config": {
            **_TEXT, "model_type": "mllama_text_model", "num_hidden_layers": 2, "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "pad_token_id": 0,
        },
        "vision_config": {
            **_VISION, "num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        "image_token_index": 150,
    },
    "InternVLForConditionalGeneration": {
        "text_config": _TEXT, "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        "image_token_id": 150, "image_seq_length": 4,
    },
    "AyaVisionForConditionalGeneration": {**_SIGLIP, "image_token_index": 150, "downsample_factor": 2},
    "Mistral3ForConditionalGeneration": {
        **_PIXTRAL, "image_token_index": 150, "spatial_merge_size": 2, "vision_feature_layer": -1,
    },
    "LlavaForConditionalGeneration of Pixtral": {
        **_PIXTRAL, "image_token_index": 150, "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    },
    "Llama4ForConditionalGeneration": {
        "text_config": {**_TEXT, "model_type": "llama4_text", "intermediate_size_mlp": 64, "num_local_experts": 2},
        "vision_config": {
            **_VISION, "intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64,
            "projector_output_dim": 64, "pixel_shuffle_ratio": 0.5,
        },
        "image_token_index": 150,
    },
}  # fmt: skip
_ONE_SIZE_OR_IMAGE = {"LlavaOnevisionForConditionalGeneration", "Llama4ForConditionalGeneration"}
_BROKEN = {
    "Llama4ForConditionalGeneration": pytest.mark.xfail(
        parse_version(metadata.version("transformers")) == (5, 24),
        reason="its forward reads `image_outputs`, which the inner model does not return",
        raises=AttributeError,
    )
}
"""Families whose forward fails in a release of transformers."""


@pytest.fixture
def picture() -> Callable[..., Workload]:
    """Describe the training of a tiny model that sees; keywords are those of ``data``."""

    def make(name: str, batch: int = 2, **data: Any) -> Workload:
        model = {"class": name.split()[0], "config": copy.deepcopy(FAMILIES.get(name, {}))}
        return Workload.from_mapping({
            "model": model, "data": data, "train": {"per_device_train_batch_size": batch}, "steps": 1,
        })  # fmt: skip

    return make


def _batch(workload: Workload) -> dict[str, Any]:
    with torch.device("meta"):
        model = build_model(workload)
    return build_batch(workload, model)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_BROKEN.get(name, ())) for name in FAMILIES])
def test_placeholders_are_as_many_as_what_the_model_makes_of_its_images(
    picture: Callable[..., Workload], name: str
) -> None:
    described = [{}] if name in _ONE_SIZE_OR_IMAGE else [{"images": 2, "image_size": [48, 100]}, {"images": 3}]
    for data in [*described, {} if "Llama4" in name else {"image_size": 40}]:
        workload = picture(name, **data)
        model = build_model(workload)
        batch = build_batch(workload, model)
        assert model(**batch).loss.dim() == 0  # which raises an error where they differ
        is_image = batch["input_ids"] == 150
        assert torch.equal(batch["labels"] == -100, is_image)
        changes = (is_image[:, 1:] != is_image[:, :-1]).sum(1)
        assert changes.tolist() == [2 * data.get("images", 1) - 1] * 2  # text between images


def _shape(name: str, config: dict[str, Any], parameters: str, size: tuple[int, int]) -> Shape:
    from transformers import AutoConfig

    built = AutoConfig.for_model(name, **config)
    return Shape(name, built, frozenset(parameters.split()), "input_ids", Lengths(0, 0), 1, size)


def test_the_size_of_a_model_may_be_given_where_no_other_is_known() -> None:
    unknown = {"vision_config": {"image_size": 56, "patch_size": 14}}
    shape = _shape("llama4", unknown, "pixel_values", (56, 56))
    assert rule_of(shape) is None and (shape.layout.height, shape.layout.width) == (56, 56)
    with pytest.raises(WorkloadError, match="is not known: leave it out"):
        _ = replace(shape, asked_size=(56, 112)).layout


def test_the_smaller_limit_comes_first(picture: Callable[..., Workload]) -> None:
    with pytest.raises(WorkloadError, match="image_limits: begins with 99, above 9: give the smaller one first"):
        picture("Qwen2VLForConditionalGeneration", image_limits=[99, 9])


def test_images_are_scaled_before_the_processor_gets_them() -> None:
    whole = _shape("qwen2_vl", {}, "pixel_values image_grid_thw", (1500, 2000))
    assert (whole.layout.height, whole.layout.width) == (1512, 1988)
    scaled = replace(whole, pixels=(32**2, 768**2))  # to 665 x 886
    assert (scaled.layout.height, scaled.layout.width) == (672, 896)
    enlarged = replace(whole, asked_size=(20, 20), pixels=(200**2, 768**2))
    assert (enlarged.layout.height, enlarged.layout.width) == (196, 196)
    pixtral = {"vision_config": {"model_type": "pixtral", "image_size": 1024, "patch_size": 16}}
    default = replace(_shape("llava", pixtral, "pixel_values image_sizes", (1, 1)), asked_size=None)
    assert default.layout.height == 1024 and replace(default, pixels=(1, 768**2)).layout.height == 768


def test_layouts_are_those_of_the_processors_of_transformers() -> None:
    """Compare drawn sizes with what each processor says, given the limits that are used here."""
    pytest.importorskip("PIL")
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
    from transformers.models.mllama.image_processing_pil_mllama import get_optimal_tiled_canvas
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits = dict(zip(("shortest_edge", "longest_edge"), _PIXELS["qwen2_vl"], strict=True))
    qwen = Qwen2VLImageProcessorPil(size=limits)
    glm, crops, tiles = Glm4vImageProcessorPil(), GotOcr2ImageProcessorPil(), Idefics3ImageProcessorPil()
    crops.size, crops.crop_to_patches = {"height": 448, "width": 448}, True
    next_, one = object.__new__(LlavaNextProcessor), object.__new__(LlavaOnevisionProcessor)
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    many = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    for processor, offered in ((next_, pinpoints), (one, many)):
        processor.image_processor = type("", (), {"image_grid_pinpoints": offered})
    next_.patch_size, next_.num_additional_image_tokens = 14, 0
    one.num_image_tokens, one.vision_aspect_ratio = 729, "anyres_max_9"
    clip = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    siglip = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    draw = random.Random(7)
    for _ in range(60):
        size = (draw.randint(30, 3000), draw.randint(30, 3000))

        def seen(name: str, config: dict[str, Any], parameters: str = "pixel_values", size: Any = size) -> Shape:
            return _shape(name, config, parameters, size)

        grid = "pixel_values image_grid_thw"
        assert seen("qwen2_vl", {}, grid).image_tokens == qwen.get_number_of_image_patches(*size) // 4
        of_glm = {"vision_config": {"image_size": 336, "patch_size": 14, "spatial_merge_size": 2}}
        assert seen("glm4v", of_glm, grid).image_tokens == glm.get_number_of_image_patches(*size) // 4
        assert seen("internvl", {}).layout.views == crops.get_number_of_image_patches(*size)
        for most in (1, 6):
            few = replace(seen("internvl", {}), limits=(1, most))
            assert few.layout.views == crops.get_number_of_image_patches(*size, {"max_patches": most})
        of_tiles = {"vision_config": {"image_size": 364}}
        layout = seen("idefics3", of_tiles).layout
        assert (layout.views, layout.rows, layout.columns) == tiles.get_number_of_image_patches(*size)
        of_next = {"vision_config": clip, "image_grid_pinpoints": pinpoints}
        tokens = next_._get_number_of_features(*size, 336, 336)
        assert seen("llava_next", of_next, "pixel_values image_sizes").image_tokens == tokens
        of_one = {"vision_config": siglip, "image_grid_pinpoints": many}
        tokens = one._get_number_of_features(*size, 384, 384)
        assert seen("llava_onevision", of_one, "pixel_values image_sizes").image_tokens == tokens
        rows, columns = (side // 560 for side in get_optimal_tiled_canvas(*size, 4, 560))
        layout = seen("mllama", {"vision_config": {"image_size": 560}}, "pixel_values aspect_ratio_ids").layout
        assert (layout.rows, layout.columns) == (rows, columns)
        whole = seen("mistral3", {"vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14}})
        resized = get_resize_output_image_size(torch.zeros(3, *size).numpy(), (1540, 1540), (28, 28))
        assert whole.image_size[1:] == resized


def test_the_length_of_a_sequence_counts_the_tokens_of_its_images(picture: Callable[..., Workload]) -> None:
    name = "InternVLForConditionalGeneration"  # 9 views of 4 tokens
    assert _batch(picture(name, sequence_length=100, image_size=[48, 100]))["input_ids"].shape == (2, 100)
    assert _batch(picture(name, image_size=[48, 100]))["input_ids"].shape == (2, 512 + 36)
    with pytest.raises(
        WorkloadError, match=r"sequence_length: 73 tokens do not hold text and the 72 tokens of 2 images"
    ):
        _batch(picture(name, sequence_length=73, image_size=[48, 100], images=2))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("Llama4ForConditionalGeneration", {"image_size": 64}, r"data\.image_size: .* than 32 × 32 is not known"),
        ("LlavaOnevisionForConditionalGeneration", {"images": 2}, r"data\.images: .* with one image for each sample"),
        ("BertForMaskedLM", {"image_size": 64}, r"data\.image_size: BertForMaskedLM takes no images"),
        ("ResNetForImageClassification", {"image_size": 99_999}, r"data\.image_size: .* of host memory"),
        ("Qwen2VLForConditionalGeneration", {"images": 10_000}, r"data\.images: .* of host memory"),
    ],
)
def test_images_that_cannot_be_made_are_refused(
    picture: Callable[..., Workload], name: str, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        _batch(picture(name, **data))


@pytest.mark.parametrize(
    ("name", "data", "notes"),
    [
        (
            "Qwen2VLForConditionalGeneration",
            {},
            ["one image of 224 × 224 per sample, assumed; --image-size and --images change it"],
        ),
        ("LlavaForConditionalGeneration", {}, ["one image of 32 × 32 per sample, assumed; --images changes it"]),
        (
            "LlavaForConditionalGeneration",
            {"image_size": 64},
            ["images of 64 × 64 are resized to 32 × 32, which LlavaForConditionalGeneration takes: 16 tokens each"],
        ),
        (
            "SmolVLMForConditionalGeneration",
            {"images": 2},
            ["2 images of 32 × 32 per sample, not cut into tiles, assumed; --image-size changes it"],
        ),
        (
            "SmolVLMForConditionalGeneration",
            {"image_size": 64},
            ["images of 64 × 64 are cut into 4 × 4 tiles of 32 × 32 beside the whole image: 68 tokens each"],
        ),
        (
            "Llama4ForConditionalGeneration",
            {},
            ["one image of 32 × 32 per sample, assumed; data.factory makes others"],
        ),
        ("ResNetForImageClassification", {}, ["one image of 224 × 224 per sample, assumed; --image-size changes it"]),
        ("ResNetForImageClassification", {"image_size": 256}, []),
        ("ViTForImageClassification", {}, []),
        ("Wav2Vec2ForCTC", {}, ["a recording of 10 seconds per sample, assumed; data.factory makes others"]),
        ("WhisperForConditionalGeneration", {}, []),
        ("BertForMaskedLM", {}, []),
    ],
)
def test_what_is_assumed_of_images_and_recordings_is_said(
    picture: Callable[..., Workload], name: str, data: dict[str, Any], notes: list[str]
) -> None:
    workload = picture(name, **data)
    with torch.device("meta"):
        model = build_model(workload)
    assert list(sample_notes(workload, model)) == notes


def test_a_model_of_images_takes_the_size_that_is_asked_for(picture: Callable[..., Workload]) -> None:
    assert _batch(picture("ResNetForImageClassification", image_size=[64, 96]))["pixel_values"].shape == (2, 3, 64, 96)
    workload = picture("ViTForImageClassification", image_size=384)
    assert _batch(workload)["pixel_values"].shape == (2, 3, 224, 224)
    with torch.device("meta"):
        shape = shape_of(build_model(workload), Lengths(0, 0), workload.data)
    assert shape.original_size == (384, 384)


@pytest.mark.parametrize("name", ["MllamaForConditionalGeneration", "LlavaNextForConditionalGeneration"])
def test_a_step_with_several_images_is_predicted(picture: Callable[..., Workload], name: str) -> None:
    workload = picture(name, images=2, image_size=[40, 70], sequence_length=200)
    assert simulate(workload, workload.resolve_gpu(), operations=False).steps == 1


def test_sizes_are_read_as_they_are_typed(picture: Callable[..., Workload]) -> None:
    for typed, size in (("336", 336), ("480x640", (480, 640)), ("[480, 640]", (480, 640)), ([480, 640], (480, 640))):
        workload = merge(picture("ResNetForImageClassification"), {"image-size": typed})
        assert workload.data.image_size == size
    swept = sweep([picture("ResNetForImageClassification")], ["image_size=224,[480,640]"])
    assert [each.data.image_size for each in swept] == [224, (480, 640)]
    for typed in ("large", "0", "1x2x3"):
        with pytest.raises(WorkloadError, match="--image-size"):
            merge(picture("ResNetForImageClassification"), {"image-size": typed})
