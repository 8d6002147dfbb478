"""Draw the inputs of one sample: random tensors on the CPU in the shapes that the model's configuration implies.

Shape suffixes: S input tokens, T decoder tokens, I placeholder tokens that the model replaces by an image.

Time series of a batch: the past, what is known about its times, and what follows.

Samples whose images or recordings differ in size: what the model's processor makes of each.

Texts beside images are alike: as long as the text that the largest image leaves of ``data.sequence_length``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainatomy.errors import WorkloadError
from trainatomy.training.image_layout import pads_images, rule_of
from trainatomy.training.images import (
    FRAMES,
    draw_image,
    draw_placed_patches,
    draw_region_boxes,
    draw_regions,
    draw_spectrogram,
    draw_video,
    draw_waveform,
    has_assumed_length,
    heard_frames,
    image_sizes,
)
from trainatomy.training.lengths import Sample, drawn_sizes
from trainatomy.training.model import unwrap
from trainatomy.training.positions import Lengths, lengths, position_limits
from trainatomy.training.shape import Shape, cannot_make, refuse_unused_images, refuse_unused_lengths, shape_of
from trainatomy.units import by
from trainatomy.workload.lengths import Image, number_of, pixels_of

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


def draw_series(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return the past of time series as float32.

    ``[context, channels]``; for TimesFM ``[context]``; for models that look back by lags (Informer, Autoformer),
    ``[context + longest lag]`` of one series or ``[…, series]`` of several.
    """
    config = shape.config
    if "TimesFm" in shape.class_name:
        return torch.rand(config.context_length, generator=generator)
    if _looks_back(shape):
        length = config.context_length + max(config.lags_sequence)
        return torch.rand((length, *_several(config.input_size)), generator=generator)
    if not hasattr(config, "context_length") or not hasattr(config, "num_input_channels"):
        raise cannot_make(shape, "past_values")
    return torch.rand((config.context_length, config.num_input_channels), generator=generator)


def draw_future(shape: Shape, past: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what follows ``past``, and for models that look back by lags the features of its times."""
    config = shape.config
    if "TimesFm" in shape.class_name:
        return {"future_values": torch.rand(int(config.horizon_length), generator=generator)}
    length = int(config.prediction_length)
    future = {"future_values": torch.rand((length, *past.shape[1:]), generator=generator)}
    if _looks_back(shape):
        future["future_time_features"] = torch.rand((length, config.num_time_features), generator=generator)
    return future


def draw_times(shape: Shape, drawn: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the features of the past's times, its mask of ones, and the features of each series, as float32."""
    if "past_values" not in drawn or not _looks_back(shape):
        return {}
    config, past = shape.config, drawn["past_values"]
    found = {
        "past_time_features": torch.rand((len(past), config.num_time_features), generator=generator),
        "past_observed_mask": torch.ones_like(past),
    }
    if config.num_static_categorical_features:
        kinds = [torch.randint(0, count, (1,), generator=generator) for count in config.cardinality]
        found["static_categorical_features"] = torch.cat(kinds)
    if config.num_static_real_features:
        found["static_real_features"] = torch.rand(config.num_static_real_features, generator=generator)
    return found


def _looks_back(shape: Shape) -> bool:
    """Return whether a model is given the values at certain lags, and the features of each time."""
    return hasattr(shape.config, "lags_sequence") and isinstance(shape.config.context_length, int)


def _several(count: int) -> tuple[int, ...]:
    return (count,) if count > 1 else ()


FIRST_TOKEN, LAST_TOKEN = 100, 30_000
"""Range of token ids, as in Hugging Face's guide; a smaller vocabulary limits it."""

PADDED_SHARE = 4
"""Tokens of a padded sample per token of padding."""

PHRASE_END, TEXT_START, TEXT_END = 1012, 101, 102
"""Tokens of BERT's tokenizer between which Grounding DINO finds the phrases of a text (``SPECIAL_TOKENS``)."""

Draw = Callable[[Shape, torch.Generator], Tensor]


def draw_tokens(config: Any, length: int, generator: torch.Generator) -> Tensor:
    """Return ``[length]`` int64 token ids; raise ``WorkloadError`` if the configuration has no vocabulary size.

    Models that hash characters read code points (CANINE).
    """
    if hasattr(config, "num_hash_functions") and not hasattr(config, "vocab_size"):
        return torch.randint(FIRST_TOKEN, sys.maxunicode, (length,), generator=generator)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise WorkloadError(
            f"data.factory: {type(config).__name__} has no vocab_size, so no batch can be made: "
            "name a function that makes it",
            key="data.factory",
        )
    vocabulary = int(config.vocab_size)
    first, last = (FIRST_TOKEN, min(LAST_TOKEN, vocabulary)) if vocabulary > FIRST_TOKEN else (0, vocabulary)
    return torch.randint(first, last, (length,), generator=generator)


def _input_ids(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return token ids ``[S]``, or ``[I + S]`` with the placeholders of images or a recording in front.

    A token of the text stands between two images, as the markers around images do.
    """
    text = draw_tokens(shape.text, shape.lengths.sequence, generator)
    _separate(text, shape)
    for token, count in ((shape.image_token, shape.image_tokens), (shape.audio_token, shape.audio_tokens)):
        if count:
            assert token is not None
            _refuse_beyond_vocabulary(token, shape)
            text[text == token] = (token + 1) % int(shape.text.vocab_size)
            between = (shape.images if token == shape.image_token else 1) - 1
            part = torch.full((count,), token)
            text = torch.cat([*(each for mark in text[:between] for each in (part, mark[None])), part, text[between:]])
    return text


def _refuse_beyond_vocabulary(token: int, shape: Shape) -> None:
    """Refuse a placeholder token without a row in the embedding: a GPU stops at it, a simulation would not see it."""
    if token >= int(shape.text.vocab_size):
        raise WorkloadError(
            f"model.config: the placeholder token {token} of {shape.class_name} is not below the vocab_size of its "
            f"text part, {shape.text.vocab_size}: enlarge that, or name another token",
            key="model.config",
        )


def _question(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return the token ids ``[S]`` of the instruction, in the vocabulary of the part that queries the image."""
    return draw_tokens(shape.config.qformer_config, shape.lengths.sequence, generator)


def _separate(text: Tensor, shape: Shape) -> None:
    """Write the separator tokens into ``text`` ``[S]`` that the model looks for.

    An encoder-decoder that classifies pools at the end-of-sequence token (BART); global attention covers the question,
    which a separator ends (Longformer).  Grounding DINO's text lists phrases, here of one token each.
    """
    length = len(text)
    if "GroundingDino" in shape.class_name:
        text[2::2], text[0], text[-1] = PHRASE_END, TEXT_START, TEXT_END
        return
    marks: dict[str, tuple[int, ...]] = {}
    if shape.is_encoder_decoder and "SequenceClassification" in shape.class_name:
        marks["eos_token_id"] = (length - 1,)
    elif "global_attention_mask" in shape.parameters and ("QuestionAnswering" in shape.class_name or shape.choices > 1):
        marks["sep_token_id"] = (length // 4, length // 4 + 1, length - 1)
    for name, places in marks.items():
        token = getattr(shape.text, name, None)
        if isinstance(token, int):
            text[text == token] = (token + 1) % int(shape.text.vocab_size)
            text[list(places)] = token


def _text_or_image(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return what Perceiver reads as ``inputs``: text of all its positions, or an image where its class sees."""
    is_text = any(part in shape.class_name for part in ("MaskedLM", "SequenceClassification"))
    if not is_text and "ImageClassification" not in shape.class_name:
        raise cannot_make(shape, "inputs")
    if is_text:
        return draw_tokens(shape.config, int(shape.config.max_position_embeddings), generator)
    return draw_image(shape, generator)


def _boxes(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[S, 4]`` int64: each token's left, top, right and bottom on the page, in thousandths."""
    corners = torch.randint(0, 1000, (shape.lengths.sequence, 2, 2), generator=generator)
    return corners.sort(dim=1).values.flatten(1)


INPUTS: dict[str, Draw] = {
    "input_ids": _input_ids,
    "qformer_input_ids": _question,
    "pixel_values": draw_image,
    "pixel_values_videos": draw_video,
    "flattened_patches": draw_placed_patches,
    "input_features": draw_spectrogram,
    "input_values": draw_waveform,
    "bbox": _boxes,
    "visual_feats": draw_regions,
    "visual_embeds": draw_regions,
    "visual_pos": draw_region_boxes,
    "inputs": _text_or_image,
    "past_values": draw_series,
}
"""Functions that draw each known input, by the name of the model's argument."""


_BESIDE_TEXT = ("bbox", "visual_feats", "visual_embeds", "visual_pos")
"""Inputs of models that read text from a page or about regions of an image."""


def draw_inputs(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the inputs of one sample.

    These are the model's main input and the others of ``INPUTS`` if the model joins text with images or audio, or reads
    text from a page.  A multiple-choice model gets ``[choices, …]`` of each.
    """
    if not isinstance(shape.main_input, str) or shape.main_input not in INPUTS:
        raise cannot_make(shape, shape.main_input)
    names = input_names(shape)
    if shape.choices > 1:
        return {name: torch.stack([INPUTS[name](shape, generator) for _ in range(shape.choices)]) for name in names}
    drawn = {name: INPUTS[name](shape, generator) for name in names}
    more = [image_sizes(shape, drawn), heard_frames(shape, drawn), _token_types(shape, drawn)]
    more += [_visual_masks(shape, drawn), draw_times(shape, drawn, generator)]
    return drawn | {name: value for each in more for name, value in each.items()}


def input_names(shape: Shape) -> list[str]:
    """Return the names of the inputs of a sample, beside those that say something about them."""
    names = [shape.main_input]
    if _joins_text_and_images(shape):
        both = ("input_ids", "pixel_values", "qformer_input_ids")
        names += [name for name in both if name in shape.parameters and name not in names]
    if "input_features" in shape.parameters and hasattr(shape.config, "audio_config"):
        names += ["input_features"] if "input_features" not in names else []
    if "input_ids" in names:
        names += [name for name in _BESIDE_TEXT if name in shape.parameters]
    return names


def _joins_text_and_images(shape: Shape) -> bool:
    """Return whether the configuration has parts for both, or a vocabulary beside a vision part or a patch size.

    A detector of what a text names has a backbone for images (Grounding DINO).
    """
    config = shape.config
    has_vision = hasattr(config, "vision_config") or hasattr(config, "backbone_config")
    has_words = isinstance(getattr(config, "vocab_size", None), int)
    return (has_vision and (has_words or hasattr(config, "text_config"))) or (
        has_words and hasattr(config, "patch_size")
    )


def _token_types(shape: Shape, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``[I + S]`` int64, 1 for the tokens of images, for models that require it in training."""
    if shape.image_token is None or not shape.image_tokens:
        return {}
    kinds = drawn["input_ids"].eq(shape.image_token).long()
    return {name: kinds.clone() for name in ("token_type_ids", "mm_token_type_ids") if name in shape.parameters}


def _visual_masks(shape: Shape, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return int64 ones for the text and for the regions of an image, which VisualBERT always asks for."""
    if "visual_embeds" not in drawn:
        return {}
    masks = {"attention_mask": drawn["input_ids"], "visual_attention_mask": drawn["visual_embeds"][:, 0]}
    return {name: torch.ones(len(of), dtype=torch.long) for name, of in masks.items()}


def padding_masks(shape: Shape, drawn: dict[str, Any]) -> dict[str, Tensor]:
    """Return int64 ones for what is not padding, where processors tell a model of samples that differ in size.

    Feature extractors of waveforms do so for models whose features have a layer norm (wav2vec 2.0 "large", not "base").
    """
    if "pixel_mask" in shape.parameters and "pixel_values" in drawn and "input_ids" not in drawn:
        return {"pixel_mask": torch.ones(drawn["pixel_values"].shape[-2:], dtype=torch.long)}
    if "attention_mask" not in shape.parameters or "attention_mask" in drawn:
        return {}
    is_told = "input_features" in drawn or getattr(shape.config, "feat_extract_norm", "") == "layer"
    heard = next((drawn[name] for name in ("input_features", "input_values") if name in drawn), None)
    return {"attention_mask": torch.ones(len(heard), dtype=torch.long)} if is_told and heard is not None else {}


def media_of(workload: Workload, model: nn.Module) -> tuple[Shape, list[Sample]]:
    """Return the properties of a model, and every sample of an epoch whose images or recordings differ.

    Raises:
        WorkloadError: Samples of this model do not differ so, or it is not known how.
    """
    assert workload.data.lengths is not None
    shape = shape_of(model, Lengths(0, 0), workload.data)
    refuse_unused_lengths(workload.data, shape)
    if workload.data.lengths.kind == "seconds":
        return _recordings(workload, model, shape)
    return _images(workload, model, shape)


def _recordings(workload: Workload, model: nn.Module, shape: Shape) -> tuple[Shape, list[Sample]]:
    if not any(has_assumed_length(shape, name) for name in input_names(shape)):
        hears = any(name in ("input_features", "input_values") for name in input_names(shape))
        why = "hears recordings of one length, to which its processor pads all" if hears else "hears no recordings"
        raise _refused(f"{shape.class_name} {why}: leave it out")
    if getattr(shape.config, "layerdrop", 0):
        raise WorkloadError(
            "model.config.layerdrop: leaves out layers at random, so that steps with batches of one length differ: "
            "give 0, as transformers' example scripts do",
            key="model.config.layerdrop",
        )
    drawn = [number_of(size) for size in drawn_sizes(workload)]
    limit, longest = getattr(shape.config, "max_source_positions", None), max(drawn) / number_of("1s")
    if "input_features" in shape.parameters and isinstance(limit, int) and longest * FRAMES > limit:
        raise _refused(f"{longest:g} seconds are more than the {limit:,} frames of {shape.class_name}")
    return replace(shape, lengths=lengths(workload, unwrap(model))), [Sample(samples) for samples in drawn]


def _images(workload: Workload, model: nn.Module, shape: Shape) -> tuple[Shape, list[Sample]]:
    refuse_unused_images(workload.data, shape)
    drawn = [pixels_of(size) for size in drawn_sizes(workload)]
    of_size = {image: replace(shape, asked_size=image) for image in dict.fromkeys(drawn)}
    if rule_of(shape) is None or not (shape.image_token or pads_images(shape)):
        raise _refused(f"how {shape.class_name} joins images of several sizes in a batch is not known: leave it out")
    if len(of_size) > 1 and len({each.layout for each in of_size.values()}) == 1:
        alike = by((shape.default_image_size[1], shape.default_image_size[2]))
        raise _refused(f"the processor of {shape.class_name} resizes every image to {alike}: leave it out")
    if pads_images(shape) and workload.train.train_sampling_strategy == "group_by_length":
        key = "train.train_sampling_strategy"
        raise WorkloadError(f"{key}: group_by_length needs text: the Trainer counts input_ids", key=key)
    largest = max(of_size, key=lambda image: (of_size[image].placeholders, prod(image)))
    # What the largest sample holds, as where all samples are like it.
    data = workload.data.model_copy(update={"lengths": None, "image_size": largest})
    own = lengths(workload.model_copy(update={"data": data}), unwrap(model))
    limit = position_limits(unwrap(model)).sequence
    if limit is not None and own.total > limit:
        raise _refused(f"{own.total} tokens are more than the {limit} positions of {shape.class_name}")
    made = {image: _sample(each, image, own.sequence) for image, each in of_size.items()}
    return replace(of_size[largest], lengths=own), [made[image] for image in drawn]


def _sample(shape: Shape, image: Image, text: int) -> Sample:
    layout = shape.layout
    pixels = layout.height * layout.width
    if pads_images(shape):
        return Sample(pixels, image, (layout.height, layout.width))
    return Sample(shape.placeholders + text, image, tuple(layout), shape.images * layout.views * pixels)


def sample_shape(shape: Shape, sample: Sample, *, has_own_target: bool) -> Shape:
    """Return the properties that determine one of these samples.

    Args:
        shape: Those of the model.
        sample: The sample.
        has_own_target: Whether its transcript is as long as what is spoken in its recording.
    """
    if sample.image is not None:
        return replace(shape, asked_size=sample.image)
    seconds = sample.length / number_of("1s")
    if not has_own_target:
        return replace(shape, seconds=seconds)
    target = max(1, round(shape.lengths.target * seconds / shape.seconds))
    return replace(shape, seconds=seconds, lengths=shape.lengths._replace(target=target))


def _refused(message: str) -> WorkloadError:
    return WorkloadError(f"data.lengths: {message}", key="data.lengths")
