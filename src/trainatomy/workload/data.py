"""The batch of a workload: the ``data`` section.

Rules by which samples become batches: those of ``data``, or of ``trl`` for TRL's trainers.

The sizes of samples that differ: ``data.lengths``, given as a file, a histogram or a distribution.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainatomy.results.lengths import SAMPLING_RATE
from trainatomy.workload.factory import Factory  # pydantic reads annotations when it runs
from trainatomy.workload.loops import loop_of
from trainatomy.workload.preference import is_of_preferences
from trainatomy.workload.section import Amount, Count, Index, Problem, Section, Settings, Text
from trainatomy.workload.sentence_transformers import sequences_of
from trainatomy.workload.trl import max_length, packing_strategy

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Batching:
    """Rules by which samples that differ in length become batches.

    Attributes:
        cut_to: Tokens to which longer samples are cut, None if they are not.
        at_most: Tokens beyond which samples are left out, None if none are.
        multiple: The length of a batch is rounded up to a multiple of this.
        is_joined: Whether the samples of a batch lie behind each other in one row.
        packs: TRL's strategy for packing samples into rows, None without packing.
        pack_length: Tokens that a pack holds at most.
        prompt: Tokens at the beginning of each sample that are outside the loss, where a step depends on the number of
            tokens: only those in the loss have logits (TRL), or attention takes the padding out (FlashAttention 2).
            None where it depends on the shape of its batch alone.
        sequences: Sequences of a sample in the batch.
    """

    cut_to: int | None
    at_most: int | None = None
    multiple: int = 1
    is_joined: bool = False
    packs: str | None = None
    pack_length: int = 0
    prompt: int | None = None
    sequences: int = 1

    def tokens_of_row(self, length: int) -> int:
        """Return the tokens in a row of samples of one length: TRL cuts them, or packs several into a row."""
        cut = min(length, self.cut_to or length)
        if self.packs is None:
            return cut
        if self.packs == "wrapped" or cut > self.pack_length:
            return self.pack_length
        return self.pack_length // cut * cut

    def samples_of(self, rows: int, length: int) -> int:
        """Return how many samples of one length fill these rows, and none in part where samples are cut anywhere."""
        if self.packs == "wrapped":
            together = self.pack_length // gcd(self.pack_length, length)
            return -(-rows * self.pack_length // (length * together)) * together
        return rows * max(1, self.tokens_of_row(length) // length)

    def rounded_up(self, length: int) -> int:
        """Return the length that a batch of this length is padded to."""
        return -(-length // self.multiple) * self.multiple


def batching_of(workload: Workload) -> Batching:
    """Return how a workload's samples become batches."""
    data = workload.data
    if loop_of(workload).settings is not None:
        return _of_trl(workload)
    fixed = workload.preference.framework.multiple if is_of_preferences(workload) else 1
    return Batching(
        data.sequence_length,
        multiple=data.pad_to_multiple_of or fixed,
        is_joined=data.padding_free,
        prompt=0 if _takes_padding_out(workload) and not data.padding_free else None,
    )


def _takes_padding_out(workload: Workload) -> bool:
    """Return whether attention gathers the tokens of padded samples (transformers' ``_upad_input``)."""
    return workload.model.attn_implementation == "flash_attention_2"


def _of_trl(workload: Workload) -> Batching:
    """Return how TRL's trainer makes batches: from its settings, and the prompts that ``data`` describes."""
    cut_to, longest, packs = workload.data.sequence_length, max_length(workload), packing_strategy(workload)
    prompt = workload.data.prompt_length or 0
    if workload.loop == "sft" and not workload.trl.get("completion_only_loss", True):
        prompt = 0
    if workload.loop != "reward" and packs in (None, "bfd"):
        cut_to = min((each for each in (cut_to, longest) if each is not None), default=None)
    multiple = str(workload.trl.get("pad_to_multiple_of"))
    return Batching(
        cut_to,
        at_most=longest if workload.loop == "reward" else None,
        multiple=int(multiple) if multiple.isdigit() else 1,  # None and "auto" pad to no multiple on a GPU
        is_joined=bool(workload.trl.get("padding_free")) or packs in ("bfd", "bfd_split"),
        packs=packs,
        pack_length=longest or 0,
        prompt=None if workload.loop == "reward" and not _takes_padding_out(workload) else prompt,
        sequences=sequences_of(workload),
    )


DEFAULT_SAMPLES = 2_000
"""Samples that are drawn from a distribution unless the workload says otherwise."""
MOST_COUNTED_SHAPES = 64
"""Kinds of batches that are executed, unless the workload says otherwise, where a step depends on the number of tokens:
almost every batch of an epoch is of another kind."""
LARGEST_LOG_MEAN = 20.0
"""Mean of the logarithm beyond which a mean of lengths was probably meant: exp(20) is 485 million tokens."""

Kind = Literal["tokens", "seconds", "images"]
"""What differs between samples."""
Image = tuple[int, int]
"""Height and width in pixels."""

_SECONDS = re.compile(r"([0-9.]+) *s")
_PIXELS = re.compile(r"([0-9]+) *[x×] *([0-9]+)")


def _size(value: Any, of: Any = None) -> int | str:
    """Return the size of a sample as it is written: ``128`` tokens, ``12.5s`` of a recording, ``480x640`` pixels.

    Args:
        value: A number or a text; a list of two numbers is the height and width of an image.
        of: What a number counts: seconds, or the pixels of a square image's sides; else tokens.
    """
    if of == "images" and isinstance(value, list | tuple) and len(value) == 2:
        value = f"{value[0]}x{value[1]}"
    text = str(value).strip().lower()
    if pixels := _PIXELS.fullmatch(text):
        sides: tuple[Any, ...] = pixels.groups()
    else:
        seconds = _SECONDS.fullmatch(text)
        if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]+(\.[0-9]*)?", seconds[1] if seconds else text):
            raise PydanticCustomError(
                "size",
                "must be tokens (128), seconds (12.5s) or pixels (480x640), found {found}",
                {"found": repr(value)},
            )
        number = float(seconds[1] if seconds else text)
        if seconds or of == "seconds" or not number.is_integer():
            if number <= 0:
                raise PydanticCustomError("size", "must be longer than 0 seconds, found {found}", {"found": value})
            return f"{number:g}s"
        sides = (int(number),) * (2 if of == "images" else 1)
    if min(map(int, sides)) < 1:
        raise PydanticCustomError("size", "must be at least 1, found {found}", {"found": value})
    return int(sides[0]) if len(sides) == 1 else f"{int(sides[0])}x{int(sides[1])}"


def _kind(size: int | str) -> Kind:
    return "tokens" if isinstance(size, int) else "seconds" if size.endswith("s") else "images"


Size = Annotated[int | str, BeforeValidator(_size)]
"""The size of a sample: tokens, ``12.5s`` of a recording, or ``480x640`` pixels of an image."""


def number_of(size: int | str) -> int:
    """Return the tokens of a text, or the samples of a recording."""
    return size if isinstance(size, int) else round(float(size.removesuffix("s")) * SAMPLING_RATE)


def pixels_of(size: int | str) -> Image:
    """Return the height and width of an image."""
    height, width = map(int, str(size).split("x"))
    return height, width


def rank_of(size: int | str) -> tuple[int, ...]:
    """Return numbers by which sizes are put in order."""
    if _kind(size) != "images":
        return (number_of(size),)
    height, width = pixels_of(size)
    return height * width, height


_SOURCES = ("file", "histogram", "distribution")
_OF_DISTRIBUTION = ("mean", "sigma", "minimum", "maximum")
_NEEDS = {"lognormal": ("mean", "sigma"), "normal": ("mean", "sigma"), "uniform": ("minimum", "maximum")}


class LengthsSpec(Section):
    """The size of each sample: tokens before truncation to ``data.sequence_length``, seconds, or pixels.

    A file is read when the workload is validated and becomes the histogram, so that a workload does not depend on it.
    """

    file: Text | None = Field(
        default=None,
        description="file with a length per line, or a column of a CSV, JSON or JSON Lines file; becomes the histogram",
    )
    column: Text | None = Field(default=None, description="column of `file` with the lengths")
    of: Kind | None = Field(
        default=None,
        description="what plain numbers are: tokens of texts (the default), `seconds` of recordings, or pixels of the "
        "sides of `images`; `12.5s` and `480x640` (height and width) say it themselves",
    )
    histogram: dict[Size, Count] | None = Field(default=None, description="number of samples of each length")
    distribution: Literal["lognormal", "normal", "uniform"] | None = Field(
        default=None, description="distribution from which lengths are drawn"
    )
    mean: Amount | None = Field(
        default=None,
        description="mean in tokens, seconds, or pixels of a side; of `lognormal`, as in NumPy, that of the logarithm",
    )
    sigma: Amount | None = Field(
        default=None, description="standard deviation, in the same; of `lognormal` that of the logarithm"
    )
    minimum: Size | None = Field(default=None, description="shortest drawn length, or smallest image")
    maximum: Size | None = Field(default=None, description="longest drawn length, or largest image")
    samples: Count | None = Field(
        default=None,
        description=f"samples of an epoch (default: those of the histogram, {DEFAULT_SAMPLES} of a distribution)",
    )
    seed: Index = Field(default=0, description="seed of the drawn lengths, and of the first order of samples")
    orders: Count = Field(default=8, description="orders of the samples to predict, each with its own seed")
    shapes: Count | None = Field(
        default=None,
        description="maximum number of padded lengths to execute; each one left out is replaced by the next longer, "
        "which makes reserved memory less exact (default: all; with `loop: sft` and `dpo`: "
        f"{MOST_COUNTED_SHAPES} combinations of padded length and tokens; with images and recordings: as many batches)",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """Accept the name of a file, a list of lengths, or a histogram alone; read the file."""
        if isinstance(value, str):
            value = {"file": value}
        elif isinstance(value, Sequence):
            value = {"histogram": dict(Counter(value))}
        elif isinstance(value, Mapping) and value and all(_is_length(key) for key in value):
            value = {"histogram": dict(value)}
        if not isinstance(value, Mapping):
            return value
        value, of = dict(value), value.get("of")
        if isinstance(value.get("file"), str) and value.get("histogram") is None:
            sizes = Counter(_read(value.pop("file"), value.pop("column", None), of))
            value["histogram"] = {size: sizes[size] for size in sorted(sizes, key=rank_of)}
        elif isinstance(value.get("histogram"), Mapping):
            value["histogram"] = {_size(size, of): count for size, count in value["histogram"].items()}
        for name in ("minimum", "maximum"):
            if value.get(name) is not None:
                value[name] = _size(value[name], of)
        return value

    def contradictions(self) -> list[Problem]:
        """Refuse anything but one source of lengths, and parameters that it does not have."""
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            return [Problem((), f"needs one of file, histogram and distribution; found {found}")]
        if len(kinds := self._kinds) > 1:
            return [Problem((), f"has sizes of several kinds, {' and '.join(kinds)}: describe one of them")]
        if self.distribution is None:
            extra = [name for name in _OF_DISTRIBUTION if getattr(self, name) is not None]
            return [Problem((name,), f"belongs to a distribution, not to a {given[0]}") for name in extra]
        return self._distribution_problems(self.distribution)

    def _distribution_problems(self, name: str) -> list[Problem]:
        problems = [
            Problem((need,), f"is needed by distribution: {name}")
            for need in _NEEDS[name]
            if getattr(self, need) is None
        ]
        if name == "uniform":
            extra = [each for each in ("mean", "sigma") if getattr(self, each) is not None]
            problems += [Problem((each,), "does not apply to distribution: uniform") for each in extra]
        if name == "lognormal" and (self.mean or 0) > LARGEST_LOG_MEAN:
            message = f"is the mean of the logarithm, found {self.mean:g}: for lengths around 150 tokens give 5"
            problems.append(Problem(("mean",), message))
        if self.minimum is not None and self.maximum is not None and self._is_reversed:
            problems.append(Problem(("minimum",), f"is {self.minimum}, above the maximum of {self.maximum}"))
        return problems

    @property
    def _is_reversed(self) -> bool:
        assert self.minimum is not None
        assert self.maximum is not None
        if self.kind != "images":
            return number_of(self.minimum) > number_of(self.maximum)
        return any(low > high for low, high in zip(pixels_of(self.minimum), pixels_of(self.maximum), strict=True))

    @property
    def _kinds(self) -> list[Kind]:
        """Return what the given sizes are of, each kind once."""
        bounds = [each for each in (self.minimum, self.maximum) if each is not None]
        given = [_kind(size) for size in (*(self.histogram or ()), *bounds)]
        return list(dict.fromkeys([*([self.of] if self.of else []), *given]))

    @property
    def kind(self) -> Kind:
        """Return what differs between samples."""
        return next(iter(self._kinds), "tokens")

    @property
    def count(self) -> int:
        """Return the number of samples in an epoch."""
        return self.samples or (sum(self.histogram.values()) if self.histogram else DEFAULT_SAMPLES)


def _is_length(key: Any) -> bool:
    try:
        return bool(_size(key))
    except PydanticCustomError as error:
        return error.message_template.startswith("must be at least")


def _read(file: str, column: Any, of: Any) -> list[int | str]:
    """Return the sizes in a file; the column may be left out where there is one only."""
    path = FilePath(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        raise _problem(f"{file} cannot be read: {reason}") from None
    try:
        sizes = [_size(value, of) for value in _values(path.suffix.lower(), text, column, of)]
    except (ValueError, TypeError, KeyError) as error:
        raise _problem(f"{file}: {_reason(error)}") from None
    if not sizes:
        raise _problem(f"{file}: lengths must be at least 1; found none")
    return sizes


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("lengths", "{message}", {"message": message})


def _reason(error: Exception) -> str:
    if isinstance(error, PydanticCustomError):
        return f"lengths {error.message()}"
    return f"there is no column {error}" if isinstance(error, KeyError) else str(error)


def _values(suffix: str, text: str, column: Any, of: Any) -> list[Any]:
    if suffix == ".json":
        return [_of_column(row, column, of) for row in _rows(json.loads(text), column)]
    if suffix == ".jsonl":
        return [_of_column(json.loads(line), column, of) for line in text.splitlines() if line.strip()]
    if suffix in (".csv", ".tsv"):
        return _csv_values(text, "\t" if suffix == ".tsv" else ",", column)
    return [line for line in text.split() if line]


def _rows(content: Any, column: Any) -> list[Any]:
    """Return the rows of a JSON file: a list, or the list in one column of a mapping."""
    found = content[column] if isinstance(content, dict) and column is not None else content
    if not isinstance(found, list):
        raise ValueError("must hold a list of lengths or of rows")
    return found


def _of_column(row: Any, column: Any, of: Any) -> Any:
    """Return the length in a row; a list of tokens has as many as it is long, one of an image is its two sides."""
    if isinstance(row, dict):
        if column is None:
            raise ValueError(f"rows have the columns {', '.join(row)}: name one as `column`")
        row = row[column]
    return len(row) if isinstance(row, list) and of != "images" else row


def _csv_values(text: str, separator: str, column: Any) -> list[str]:
    rows = [row for row in csv.reader(text.splitlines(), delimiter=separator) if row]
    if not rows:
        return []
    header = rows[0]
    if column is None:
        if len(header) > 1:
            raise ValueError(f"has the columns {', '.join(header)}: name one as `column`")
        return [row[0] for row in rows if row[0][:1].isdigit() or row is not header]
    if column not in header:
        raise KeyError(column)
    return [row[header.index(column)] for row in rows[1:]]


DEFAULT_SEQUENCE_LENGTH = 512
"""Tokens in a sample unless the workload says otherwise; a model with fewer positions gets as many as it has."""
PREDICTED_IDS = "trainatomy.training.batch:predicted_ids"
"""A ``preprocess_logits_for_metrics`` that keeps the id with the largest logit."""


class DataSpec(Section):
    """The shape of one sample. Recordings follow the model's configuration, and images unless they are described."""

    sequence_length: Count | None = Field(
        default=None,
        description="tokens in a sample, with those that stand for its images and recordings, as `max_length` counts "
        f"(default: {DEFAULT_SEQUENCE_LENGTH} of text, or the model's maximum if smaller)",
    )
    target_length: Count | None = Field(
        default=None,
        description="tokens on the decoder side of an encoder-decoder (default: `sequence_length`), or of a transcript "
        "(default: what is spoken in 10 seconds, 150 letters or 35 word pieces)",
    )
    prompt_length: Count | None = Field(
        default=None,
        description="with `loop: sft`, `dpo`, `kto` and `preference`: tokens of each sample that are its prompt and "
        "outside the loss (default of `sft` and `preference`: none, a text without a prompt)",
    )
    images: Count | None = Field(default=None, description="images of each sample, for models that see (default: 1)")
    image_size: Count | tuple[Count, Count] | None = Field(
        default=None,
        description="pixels of an image before the model's processor, which resizes it and cuts it into tiles: one "
        "number for a square, or `[height, width]` (`480x640` as a flag; default: a size that the model takes)",
    )
    image_limits: tuple[Count, Count] | None = Field(
        default=None,
        description="`[low, high]`: the limits to which the model's processor resizes images, where they are not its "
        "defaults: fewest and most pixels (Qwen-VL's `min_pixels` and `max_pixels`), or pixels of the shortest and the "
        "longest edge (detectors whose processors pad, such as DETR)",
    )
    attention_mask: bool = Field(
        default=False, description="include an attention mask of ones in the batch, as tokenizers do"
    )
    padding: bool | Literal["longest", "max_length"] = Field(
        default=False,
        description="pad the samples, so that the mask has zeros and attention cannot skip it; with `lengths`: to the "
        "`longest` of a batch (the default) or to `max_length`, which is `sequence_length`",
    )
    pad_to_multiple_of: Count | None = Field(
        default=None,
        description="round the length of a batch up to a multiple of this, with tokens that the mask leaves out",
    )
    packing: bool = Field(
        default=False, description="with `lengths`: join samples and cut them into packs of `sequence_length` tokens"
    )
    padding_free: bool = Field(
        default=False,
        description="with `lengths`: join the samples of a batch into one row, with `position_ids` instead of padding "
        "(`DataCollatorWithFlattening`)",
    )
    lengths: LengthsSpec | None = Field(default=None, description="lengths of the samples, where they differ")
    factory: Factory | None = Field(
        default=None,
        description="`package.module:batch` or `path/to/file.py:batch`: a function that takes the batch size "
        "and returns a dict of tensors",
    )
    factory_arguments: Settings = Field(
        default_factory=dict, description="further arguments of that function, by their names"
    )

    train_samples: Count | None = Field(
        default=None,
        description="samples of the data set, for how long the whole training takes (of `lengths`: `lengths.samples`)",
    )
    eval_samples: Count | None = Field(
        default=None,
        description="samples of one evaluation (default: two batches, or two rounds of `eval_accumulation_steps`)",
    )
    compute_metrics: bool | Factory = Field(
        default=False,
        description="gather logits and labels in evaluations, as a Trainer with `compute_metrics` does: `true`, or a "
        "reference to the function, which is called only with `batch_eval_metrics` (otherwise it works on the host)",
    )
    preprocess_logits_for_metrics: Factory | None = Field(
        default=None,
        description="reference to the Trainer's `preprocess_logits_for_metrics`, which reduces logits before they "
        "are gathered",
    )

    @property
    def has_mask(self) -> bool:
        """Return whether the batch has an attention mask; padded samples always do."""
        is_padded = bool(self.padding) or self.pad_to_multiple_of is not None
        return self.attention_mask or is_padded or (self.varies and not self.padding_free)

    def rounded_up(self, length: int) -> int:
        """Return the length of a batch whose longest sample has this many tokens."""
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    @property
    def varies(self) -> bool:
        """Return whether the batches of an epoch have different lengths."""
        return self.lengths is not None and not self.packing and self.padding != "max_length"

    @property
    def varying_media(self) -> bool:
        """Return whether the images or recordings of samples differ in size."""
        return self.lengths is not None and self.lengths.kind != "tokens"

    @property
    def image_height_width(self) -> tuple[int, int] | None:
        """Return the height and width of an image, if they are given."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @field_validator("image_size", "image_limits", mode="before")
    @classmethod
    def _two_numbers(cls, value: Any) -> Any:
        """Read the texts of a command line: ``480x640``, ``480,640`` or ``[480, 640]``."""
        if isinstance(value, str):
            value = [part.strip() for part in re.split("[x×,]", value.strip("[]()"))]
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value

    @field_validator("padding", mode="before")
    @classmethod
    def _padding(cls, value: Any) -> Any:
        """Read the texts of a command line; ``true`` is what tokenizers call ``longest``."""
        return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
