"""Draw the labels of a sample, by the head of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainatomy.training.samples import draw_future, draw_tokens
from trainatomy.training.shape import Shape, cannot_make, image_size

Labels = dict[str, Any]
"""Tensors by name; a detector has a dict of tensors under one name."""

Maker = Callable[[Shape, Labels, torch.Generator], Labels]

OBJECTS = 7
"""Objects per image, as in COCO (Lin et al. 2014, section 5: 7.7 on average)."""

IGNORED = -100
"""The label that cross-entropy ignores."""


def _class(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return one class, an int64 scalar; a float for regression, a float vector for multi-label classification."""
    count = int(shape.config.num_labels)
    if getattr(shape.config, "problem_type", None) == "multi_label_classification":
        return {"labels": torch.randint(0, 2, (count,), generator=generator).float()}
    if count == 1:
        return {"labels": torch.rand((), generator=generator)}
    return {"labels": torch.randint(0, count, (), generator=generator)}


def _class_per_token(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    return {"labels": torch.randint(0, int(shape.config.num_labels), inputs["input_ids"].shape, generator=generator)}


def _token(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return a token per position: of the decoder ``[T]``, random for a masked model ``[S]``, else the input."""
    if shape.is_encoder_decoder:
        return {"labels": draw_tokens(shape.decoder, shape.lengths.target, generator)}
    if "MaskedLM" in shape.class_name:
        return {"labels": draw_tokens(shape.text, len(next(iter(inputs.values()))), generator)}
    labels = inputs["input_ids"].clone()
    for token, count in ((shape.image_token, shape.image_tokens), (shape.audio_token, shape.audio_tokens)):
        if count:
            labels[labels == token] = IGNORED
    return {"labels": labels}


def _answer(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return the labels of question answering.

    Start and end of the answer in a text; ``[S]`` int64, 1 for its tokens, in a table; ``[num_labels]`` float32, a
    score per known answer, about an image (LXMERT: the index of the answer).
    """
    if "start_positions" in shape.parameters:
        return _span(shape, inputs, generator)
    if "aggregation_labels" in shape.parameters:
        return {"labels": torch.randint(0, 2, inputs["input_ids"].shape, generator=generator)}
    if hasattr(shape.config, "num_qa_labels"):
        return {"labels": torch.randint(0, int(shape.config.num_qa_labels), (), generator=generator)}
    return {"labels": torch.rand(int(shape.config.num_labels), generator=generator)}


def _span(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    ends = torch.randint(0, shape.lengths.sequence, (2,), generator=generator).sort().values
    return {"start_positions": ends[0].clone(), "end_positions": ends[1].clone()}


def _class_per_frame(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return ``[frames, num_labels]`` float32, 1 for the class of each frame that is left of a waveform."""
    heard = next(iter(inputs.values()))
    frames, config = len(heard), shape.config
    if heard.dim() == 1:
        for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            frames = (frames - kernel) // stride + 1
    classes = torch.randint(0, int(config.num_labels), (frames,), generator=generator)
    return {"labels": torch.nn.functional.one_hot(classes, int(config.num_labels)).float()}


def _choice(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return the index of the right choice."""
    return {"labels": torch.randint(0, shape.choices, (), generator=generator)}


def _class_per_pixel(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return ``[H, W]`` int64."""
    size = inputs["pixel_values"].shape[-2:]
    return {"labels": torch.randint(0, int(shape.config.num_labels), size, generator=generator)}


def _transcript(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return ``[T]`` characters or word pieces; 0 is the blank of connectionist temporal classification."""
    return {"labels": torch.randint(1, int(shape.config.vocab_size), (shape.lengths.target,), generator=generator)}


def _objects(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return the objects of an image: ``class_labels [n]`` int64 and ``boxes [n, 4]`` float32.

    A box is its centre, width and height as fractions of the image.
    """
    centres, sizes = torch.rand((2, OBJECTS, 2), generator=generator).unbind()
    boxes = torch.cat([0.25 + centres / 2, 0.05 + sizes / 2.5], dim=1)
    return {"labels": {"class_labels": _classes(shape, generator), "boxes": boxes}}


def _masks(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return the segments of an image: ``class_labels [n]`` int64 and ``mask_labels [n, H, W]`` float32 of 0 and 1.

    A detector that also segments has the masks beside its boxes, as ``masks``.
    """
    masks = torch.randint(0, 2, (OBJECTS, *inputs["pixel_values"].shape[-2:]), generator=generator).float()
    if "mask_labels" in shape.parameters:
        return {"mask_labels": masks, "class_labels": _classes(shape, generator)}
    objects = _objects(shape, inputs, generator)["labels"]
    return {"labels": {**objects, "masks": masks}}


def _classes(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randint(0, int(shape.config.num_labels), (OBJECTS,), generator=generator)


def _pretraining(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return a token per position and whether the second sentence follows the first, as in BERT's pre-training.

    A model that masks its images itself needs no labels (ViTMAE).
    """
    if set(inputs) == {"pixel_values"} and "labels" not in shape.parameters:
        return _masked_image(shape, inputs, generator) if "bool_masked_pos" in shape.parameters else {}
    labels = {"labels": draw_tokens(shape.text, shape.lengths.sequence, generator)}
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in shape.parameters:
            labels[name] = torch.randint(0, 2, (), generator=generator)
    return labels


def _hidden_patches(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[patches]`` bool, half of them true: the patches of an image or video to reconstruct."""
    _, height, width = image_size(shape.config)
    patch = int(shape.config.patch_size)
    count = (height // patch) * (width // patch)
    if isinstance(frames := getattr(shape.config, "num_frames", None), int):
        count *= frames // int(shape.config.tubelet_size)
    hidden = torch.zeros(count, dtype=torch.bool)
    hidden[torch.randperm(count, generator=generator)[: count // 2]] = True
    return hidden


def _masked_image(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return the patches to reconstruct as ``bool_masked_pos``.

    Raises:
        WorkloadError: The model also needs the content of the patches (BEiT: tokens of an image tokenizer).
    """
    if "labels" in shape.parameters:
        raise cannot_make(shape, "labels")
    return {"bool_masked_pos": _hidden_patches(shape, generator)}


def _future(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return what follows ``past_values``."""
    return draw_future(shape, inputs["past_values"], generator)


def _series_target(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return what a time series is mapped to: ``[num_targets]`` float32, or a class for a classifier."""
    if "target_values" not in shape.parameters:
        raise cannot_make(shape, "labels")
    count = int(shape.config.num_targets)
    if "Classification" in shape.class_name:
        return {"target_values": torch.randint(0, count, (), generator=generator)}
    return {"target_values": torch.rand(count, generator=generator)}


MAKERS: tuple[tuple[str, Maker], ...] = (
    ("ForTokenClassification", _class_per_token),
    ("SequenceClassification", _class),
    ("ImageClassification", _class),
    ("AudioClassification", _class),
    ("AudioFrameClassification", _class_per_frame),
    ("VideoClassification", _class),
    ("ForXVector", _class),
    ("MultipleChoice", _choice),
    ("SemanticSegmentation", _class_per_pixel),
    ("ObjectDetection", _objects),
    ("InstanceSegmentation", _masks),
    ("UniversalSegmentation", _masks),
    ("DetrForSegmentation", _masks),
    ("ForCTC", _transcript),
    ("NextSentencePrediction", _class),
    ("ForQuestionAnswering", _answer),
    ("ForPreTraining", _pretraining),
    ("ForPrediction", _future),
    ("ForRegression", _series_target),
    ("ForClassification", _series_target),
    ("MaskedImageModeling", _masked_image),
    ("MaskedLM", _token),
    ("CausalLM", _token),
    ("LMHead", _token),
    ("ForConditionalGeneration", _token),
    ("ForSpeechSeq2Seq", _token),
)
"""The function that draws the labels, by a part of the class's name; the first match decides."""


def draw_labels(shape: Shape, inputs: Labels, generator: torch.Generator) -> Labels:
    """Return the labels of one sample; raise ``WorkloadError`` for a head that is not in ``MAKERS``."""
    for part, make in MAKERS:
        if part in shape.class_name:
            return make(shape, inputs, generator)
    if "return_loss" in shape.parameters and "labels" not in shape.parameters:
        return {}  # texts and images of a batch are each other's labels
    if "labels" in shape.parameters and _writes_text(shape, inputs):
        return _token(shape, inputs, generator)
    raise cannot_make(shape, "labels")


def _writes_text(shape: Shape, inputs: Labels) -> bool:
    """Return whether the labels are tokens: the model reads text, or its decoder writes it."""
    return hasattr(shape.decoder, "vocab_size") and ("input_ids" in inputs or shape.is_encoder_decoder)


def draw_decoder_inputs(shape: Shape, generator: torch.Generator) -> Labels:
    """Return the decoder's input in inference, where there are no labels."""
    if not shape.is_encoder_decoder:
        return {}
    return {"decoder_input_ids": draw_tokens(shape.decoder, shape.lengths.target, generator)}


def decoder_inputs_of(shape: Shape, targets: Labels) -> Labels:
    """Return the decoder's input if the Trainer computes the loss itself (label smoothing).

    The model does not see the labels then; ``DataCollatorForSeq2Seq`` adds them to the batch, shifted by one.
    """
    labels = targets.get("labels")
    if "decoder_input_ids" not in shape.parameters or labels is None or labels.dim() != 1:
        return {}
    return {"decoder_input_ids": labels.roll(1)}
