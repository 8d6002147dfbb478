"""What every section of a workload shares: strictness, the small number types, and how a contradiction is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Path = tuple[str | int, ...]


class Problem(NamedTuple):
    """One thing that is wrong: the key it is about (``("train", "fp16")``) and what to say."""

    path: Path
    message: str

    def __str__(self) -> str:
        where = ".".join(map(str, self.path))
        return f"{where}: {self.message}" if where else self.message


class Section(BaseModel):
    """A frozen group of keys; a key that it does not have is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, allow_inf_nan=False)

    def contradictions(self) -> list[Problem]:
        """Keys that are each valid but cannot stand together; paths are relative to this section."""
        return []

    def model_post_init(self, context: Any, /) -> None:
        """Refuse contradictions.  Raises ``PydanticCustomError`` that carries every ``Problem``."""
        if problems := self.contradictions():
            refuse(problems)


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one pydantic error that carries all ``problems`` (``explain.py`` unpacks them)."""
    text = "; ".join(problem.message for problem in problems)
    raise PydanticCustomError("contradiction", "{text}", {"text": text, "problems": list(problems)})


def _number(value: Any) -> Any:
    """Python takes True for 1; a description that says ``per_device_train_batch_size: true`` is a mistake."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number")
    if isinstance(value, float) and math.isnan(value):
        raise PydanticCustomError("number", "must be a number")
    return value


def number_as_text(value: Any) -> Any:
    """YAML reads ``name: 2022`` as a number; where a text is wanted, it is that text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    """One name where several are allowed is a list of one."""
    return (value,) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """A mapping becomes a plain dict, so that a workload can be written as YAML and JSON again."""
    return dict(value) if isinstance(value, Mapping) else value


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
"""How many: 1 or more."""

Index = Annotated[int, BeforeValidator(_number), Field(ge=0)]
"""0 or more."""

Integer = Annotated[int, BeforeValidator(_number)]

Amount = Annotated[float, BeforeValidator(_number), Field(ge=0)]
"""A number that is not negative."""

Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
"""From 0 to 1."""

Decay = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
"""From 0 to just below 1, as the betas of Adam."""

Text = Annotated[str, BeforeValidator(number_as_text), Field(min_length=1)]
"""A text that is not empty."""

Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""A list of names; a single name is a list of one."""

Settings = Annotated[dict[str, Any], BeforeValidator(_plain)]
"""A mapping whose keys are checked by the library that takes them."""
