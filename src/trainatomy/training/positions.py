"""The number of positions that a model has, and the length of sequences that follows.

Only a table of positions limits a sequence: a lookup beyond it is an error on the GPU.  Rotary and relative positions
have no limit, so for such a model ``max_position_embeddings`` gives a note and not an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from trainatomy.errors import WorkloadError
from trainatomy.training.lengths import longest_row
from trainatomy.units import by, many
from trainatomy.workload.data import DEFAULT_SEQUENCE_LENGTH, DataSpec
from trainatomy.workload.loops import loop_of
from trainatomy.workload.sentence_transformers import model_on_hub

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


SECONDS = 10.0
"""Length of a recording unless the workload says otherwise."""

LETTERS = 150
"""Letters spoken in 10 seconds.

LibriSpeech (Panayotov et al. 2015) has 9.4 million words in 960 hours, 2.7 a second, of 5.4 letters with the space.
"""

WORD_PIECES = 35
"""The same in word pieces, about 1.3 for each word."""

LARGEST_ALPHABET = 100
"""A larger vocabulary than this has word pieces, or characters that stand for syllables."""


class Lengths(NamedTuple):
    """Tokens of a sample.

    Attributes:
        sequence: Of the input text.
        target: Of its target, a decoder's text or a recording's transcript.
        placeholders: Tokens before the text that the model replaces by parts of images and recordings.
    """

    sequence: int
    target: int
    placeholders: int = 0

    @property
    def total(self) -> int:
        """Return the tokens of the input: the text, and what stands for images and recordings."""
        return self.placeholders + self.sequence


class Limits(NamedTuple):
    """Rows of the position tables that text uses; ``None`` if there is no table."""

    sequence: int | None
    target: int | None


def lengths(workload: Workload, model: nn.Module) -> Lengths:
    """Return the lengths that ``workload.data`` asks for, or else 512 or the number of the model's positions.

    The length that is asked for is that of the whole sequence, with the tokens that stand for images and recordings;
    the default is one of the text beside them.  A transcript is as long as what is spoken in the recording, so that the
    loss of CTC is finite.

    Raises:
        WorkloadError: A requested length exceeds the model's positions, or does not hold the images.
    """
    data, limits = workload.data, position_limits(model)
    name = type(model).__name__
    longest = None if data.sequence_length is None else data.rounded_up(data.sequence_length)
    _refuse_beyond("data.sequence_length", longest, limits.sequence, name)
    _refuse_beyond("data.target_length", data.target_length, limits.target, name)
    if data.varies and not data.varying_media:
        row = longest_row(workload)
        _refuse_beyond("data.lengths", row, limits.sequence, name)
        return Lengths(row, data.target_length or 1)
    replaced = _placeholders(workload, model, limits.sequence)
    positions = DEFAULT_SEQUENCE_LENGTH if limits.sequence is None else limits.sequence - replaced
    given, known = data.sequence_length, model_on_hub(workload)
    usual = DEFAULT_SEQUENCE_LENGTH if known is None else min(DEFAULT_SEQUENCE_LENGTH, known.max_seq_length)
    sequence = data.rounded_up(min(usual, positions) + replaced if given is None else given) - replaced
    if writes_transcripts(name):
        return Lengths(sequence, data.target_length or data.sequence_length or _spoken(model), replaced)
    return Lengths(sequence, data.target_length or min(sequence, limits.target or sequence), replaced)


def _placeholders(workload: Workload, model: nn.Module, limit: int | None) -> int:
    """Return the tokens that stand for the images and recordings of a sample; refuse more than the sequence holds."""
    from trainatomy.training.shape import shape_of  # which imports what imports this file

    if getattr(model, "config", None) is None or is_of_trl(workload) or workload.data.varying_media:
        return 0  # images that differ: see samples.py
    shape = shape_of(model, Lengths(0, 0), workload.data)
    replaced, given = shape.placeholders, workload.data.sequence_length
    least, longest = replaced + shape.images, given or limit
    if not replaced or longest is None or least <= longest:
        return replaced
    what = f"{many(shape.images, 'image')} of {by(shape.original_size)}" if shape.image_tokens else "a recording"
    holds = f"{longest} tokens do not hold text and the {replaced} tokens of {what}"
    if given is None:
        key, advice = "data.images" if shape.images > 1 else "data.image_size", "take smaller or fewer images"
        raise WorkloadError(f"{key}: the positions of {type(model).__name__}, {holds}: {advice}", key=key)
    key = "data.sequence_length"
    message = f"{holds}: it is the length of the whole sequence, as max_length is; give {least} or more"
    raise WorkloadError(f"{key}: {message}", key=key)


def writes_transcripts(class_name: str) -> bool:
    """Return whether models of a class are trained with the loss of CTC, on transcripts of recordings."""
    return "ForCTC" in class_name


def _spoken(model: nn.Module) -> int:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 0)
    return LETTERS if vocabulary <= LARGEST_ALPHABET else WORD_PIECES


def is_of_trl(workload: Workload) -> bool:
    """Return whether TRL makes the batches, which hold text only here."""
    return workload.mode == "training" and loop_of(workload).settings is not None


def _refuse_beyond(key: str, length: int | None, limit: int | None, model: str) -> None:
    """Raise an error if a sequence is longer than its positions."""
    if length is not None and limit is not None and length > limit:
        raise WorkloadError(f"{key}: {length} is longer than the {limit} positions of {model}", key=key)


def position_limits(model: nn.Module) -> Limits:
    """Return the rows of the smallest position table for the input text, and for the decoder's text."""
    config = getattr(model, "config", None)
    has_decoder = bool(getattr(config, "is_encoder_decoder", False))
    sequence: list[int] = []
    target: list[int] = []
    for name, module in model.named_modules():
        rows = _rows(name, module)
        if rows is None or _is_of_images_or_audio(name, model, has_decoder):
            continue
        (target if has_decoder and "decoder" in name.split(".") else sequence).append(rows)
    if isinstance(longest := getattr(config, "max_text_len", None), int):  # what Grounding DINO compares with boxes
        sequence.append(longest)
    return Limits(min(sequence, default=None), min(target, default=None))


def _rows(name: str, module: nn.Module) -> int | None:
    """Return a table's usable rows: OPT and BART reserve the first 2, RoBERTa those up to the padding index."""
    leaf = name.rpartition(".")[2]
    if not isinstance(module, nn.Embedding):
        return None
    if leaf not in {"wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed"}:
        return None
    rows = int(module.weight.shape[0])
    if hasattr(module, "offset"):
        return rows - int(module.offset)  # type: ignore[arg-type]
    return rows if module.padding_idx is None else rows - module.padding_idx - 1


def _is_of_images_or_audio(name: str, model: nn.Module, has_decoder: bool) -> bool:
    parts = name.split(".")
    if any(part.startswith(("vision", "audio")) for part in parts):
        return True
    takes_text = getattr(model, "main_input_name", "input_ids") == "input_ids"
    return not takes_text and not (has_decoder and "decoder" in parts) and "text_model" not in parts


def sequence_note(data: DataSpec, model: nn.Module) -> str | None:
    """Return a note if a sequence is longer than a model with rotary positions was made for, else ``None``."""
    made_for = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    length = data.sequence_length
    if not isinstance(made_for, int) or length is None or length <= made_for:
        return None
    return f"data.sequence_length {length} is beyond the {made_for} positions that {type(model).__name__} was made for"
