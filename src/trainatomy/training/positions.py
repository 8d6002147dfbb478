"""The number of positions that a model has, and the length of sequences that follows.

Only a table of positions limits a sequence: a lookup beyond it is an error on the GPU.  Rotary and relative positions
have no limit, so for such a model ``max_position_embeddings`` gives a note and not an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from trainatomy.errors import WorkloadError
from trainatomy.training.lengths import longest_row
from trainatomy.workload.data import DEFAULT_SEQUENCE_LENGTH, DataSpec

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


LETTERS = 150
"""Letters spoken in 10 seconds, the length of every recording here (``sounds.py``).

LibriSpeech (Panayotov et al. 2015) has 9.4 million words in 960 hours, 2.7 a second, of 5.4 letters with the space.
"""

WORD_PIECES = 35
"""The same in word pieces, about 1.3 for each word."""

LARGEST_ALPHABET = 100
"""A larger vocabulary than this has word pieces, or characters that stand for syllables."""


class Lengths(NamedTuple):
    """Tokens of a sample: of the input text, and of its target, a decoder's text or a recording's transcript."""

    sequence: int
    target: int


class Limits(NamedTuple):
    """Rows of the position tables that text uses; ``None`` if there is no table.

    ``image`` tokens come before the text and take rows as well; they are subtracted from ``sequence``.
    """

    sequence: int | None
    target: int | None
    image: int = 0


def lengths(workload: Workload, model: nn.Module) -> Lengths:
    """Return the lengths that ``workload.data`` asks for, or else 512 or the number of the model's positions.

    A transcript is as long as what is spoken in the recording, so that the loss of CTC is finite.

    Raises:
        WorkloadError: A requested length exceeds the model's positions.
    """
    data, limits = workload.data, position_limits(model)
    name = type(model).__name__
    _refuse_beyond("data.sequence_length", data.sequence_length, limits.sequence, name, limits.image)
    _refuse_beyond("data.target_length", data.target_length, limits.target, name)
    if data.varies:
        longest = longest_row(workload)
        _refuse_beyond("data.lengths", longest, limits.sequence, name, limits.image)
        return Lengths(longest, data.target_length or 1)
    sequence = data.sequence_length or min(DEFAULT_SEQUENCE_LENGTH, limits.sequence or DEFAULT_SEQUENCE_LENGTH)
    if writes_transcripts(name):
        return Lengths(sequence, data.target_length or data.sequence_length or _spoken(model))
    return Lengths(sequence, data.target_length or min(sequence, limits.target or sequence))


def writes_transcripts(class_name: str) -> bool:
    """Return whether models of a class are trained with the loss of CTC, on transcripts of recordings."""
    return "ForCTC" in class_name


def _spoken(model: nn.Module) -> int:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 0)
    return LETTERS if vocabulary <= LARGEST_ALPHABET else WORD_PIECES


def _refuse_beyond(key: str, length: int | None, limit: int | None, model: str, image: int = 0) -> None:
    """Raise an error if text is longer than its positions; ``image``: positions that the tokens of an image take."""
    if length is None or limit is None or length <= limit:
        return
    positions = f"the {limit} positions"
    if image:
        positions = f"the {limit} positions that an image of {image} tokens leaves of the {limit + image}"
    raise WorkloadError(f"{key}: {length} is longer than {positions} of {model}", key=key)


def position_limits(model: nn.Module) -> Limits:
    """Return the rows of the smallest position table for the input text, and for the decoder's text.

    The tokens of an image precede the text and take rows as well.
    """
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
    longest_text, image = min(sequence, default=None), 0
    if longest_text is not None and config is not None:
        from trainatomy.training.shape import shape_of  # which imports what imports this file

        image = shape_of(model, Lengths(0, 0)).image_tokens
        longest_text -= image
    return Limits(longest_text, min(target, default=None), image)


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
