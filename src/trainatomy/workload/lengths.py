"""The sizes of samples that differ: ``data.lengths``, given as a file, a histogram or a distribution."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from trainatomy.results.lengths import SAMPLING_RATE
from trainatomy.workload.section import Amount, Count, Index, Problem, Section, Text

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
    path = Path(file).expanduser()
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
