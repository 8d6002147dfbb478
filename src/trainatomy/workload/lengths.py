"""The lengths of samples that differ: ``data.lengths``, given as a file, a histogram or a distribution."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from trainatomy.workload.section import Amount, Count, Index, Problem, Section, Text

DEFAULT_SAMPLES = 2_000
"""Samples that are drawn from a distribution unless the workload says otherwise."""
MOST_COUNTED_SHAPES = 64
"""Kinds of batches that are executed, unless the workload says otherwise, where a step depends on the number of tokens:
almost every batch of an epoch is of another kind."""
LARGEST_LOG_MEAN = 20.0
"""Mean of the logarithm beyond which a mean of lengths was probably meant: exp(20) is 485 million tokens."""

_SOURCES = ("file", "histogram", "distribution")
_OF_DISTRIBUTION = ("mean", "sigma", "minimum", "maximum")
_NEEDS = {"lognormal": ("mean", "sigma"), "normal": ("mean", "sigma"), "uniform": ("minimum", "maximum")}


class LengthsSpec(Section):
    """Tokens of each sample, before truncation to ``data.sequence_length``.

    A file is read when the workload is validated and becomes the histogram, so that a workload does not depend on it.
    """

    file: Text | None = Field(
        default=None,
        description="file with a length per line, or a column of a CSV, JSON or JSON Lines file; becomes the histogram",
    )
    column: Text | None = Field(default=None, description="column of `file` with the lengths")
    histogram: dict[Count, Count] | None = Field(default=None, description="number of samples of each length")
    distribution: Literal["lognormal", "normal", "uniform"] | None = Field(
        default=None, description="distribution from which lengths are drawn"
    )
    mean: Amount | None = Field(
        default=None, description="mean in tokens; of `lognormal`, as in NumPy, the mean of the logarithm"
    )
    sigma: Amount | None = Field(
        default=None, description="standard deviation in tokens; of `lognormal` that of the logarithm"
    )
    minimum: Count | None = Field(default=None, description="shortest drawn length")
    maximum: Count | None = Field(default=None, description="longest drawn length")
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
        f"{MOST_COUNTED_SHAPES} combinations of padded length and tokens)",
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
        if isinstance(value, Mapping) and isinstance(value.get("file"), str) and value.get("histogram") is None:
            rest = {key: each for key, each in value.items() if key not in ("file", "column")}
            return {**rest, "histogram": dict(sorted(Counter(_read(value["file"], value.get("column"))).items()))}
        return value

    def contradictions(self) -> list[Problem]:
        """Refuse anything but one source of lengths, and parameters that it does not have."""
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            return [Problem((), f"needs one of file, histogram and distribution; found {found}")]
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
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            problems.append(Problem(("minimum",), f"is {self.minimum}, above the maximum of {self.maximum}"))
        return problems

    @property
    def count(self) -> int:
        """Return the number of samples in an epoch."""
        return self.samples or (sum(self.histogram.values()) if self.histogram else DEFAULT_SAMPLES)


def _is_length(key: Any) -> bool:
    return (isinstance(key, int) and not isinstance(key, bool)) or (isinstance(key, str) and key.isdigit())


def _read(file: str, column: Any) -> list[int]:
    """Return the lengths in a file; the column may be left out where there is one only."""
    path = FilePath(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        raise _problem(f"{file} cannot be read: {reason}") from None
    try:
        values = _values(path.suffix.lower(), text, column)
        lengths = [int(value) for value in values]
    except (ValueError, TypeError, KeyError) as error:
        raise _problem(f"{file}: {_reason(error)}") from None
    if not lengths or min(lengths) < 1:
        found = f"found {min(lengths)}" if lengths else "found none"
        raise _problem(f"{file}: lengths must be at least 1; {found}")
    return lengths


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("lengths", "{message}", {"message": message})


def _reason(error: Exception) -> str:
    return f"there is no column {error}" if isinstance(error, KeyError) else str(error)


def _values(suffix: str, text: str, column: Any) -> list[Any]:
    if suffix == ".json":
        return [_of_column(row, column) for row in _rows(json.loads(text), column)]
    if suffix == ".jsonl":
        return [_of_column(json.loads(line), column) for line in text.splitlines() if line.strip()]
    if suffix in (".csv", ".tsv"):
        return _csv_values(text, "\t" if suffix == ".tsv" else ",", column)
    return [line for line in text.split() if line]


def _rows(content: Any, column: Any) -> list[Any]:
    """Return the rows of a JSON file: a list, or the list in one column of a mapping."""
    found = content[column] if isinstance(content, dict) and column is not None else content
    if not isinstance(found, list):
        raise ValueError("must hold a list of lengths or of rows")
    return found


def _of_column(row: Any, column: Any) -> Any:
    """Return the length in a row; a list of tokens has as many as it is long."""
    if isinstance(row, dict):
        if column is None:
            raise ValueError(f"rows have the columns {', '.join(row)}: name one as `column`")
        row = row[column]
    return len(row) if isinstance(row, list) else row


def _csv_values(text: str, separator: str, column: Any) -> list[str]:
    rows = [row for row in csv.reader(text.splitlines(), delimiter=separator) if row]
    if not rows:
        return []
    header = rows[0]
    if column is None:
        if len(header) > 1:
            raise ValueError(f"has the columns {', '.join(header)}: name one as `column`")
        return [row[0] for row in rows if row[0].strip().isdigit() or row is not header]
    if column not in header:
        raise KeyError(column)
    return [row[header.index(column)] for row in rows[1:]]
