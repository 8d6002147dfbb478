"""The base class of a workload's sections, its number types, and which keys a section has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]


class Problem(NamedTuple):
    """A mistake in a workload: the path of its key (``("train", "fp16")``) and a message."""

    path: Path
    message: str

    def __str__(self) -> str:
        where = ".".join(map(str, self.path))
        return f"{where}: {self.message}" if where else self.message


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, allow_inf_nan=False)

    def contradictions(self) -> list[Problem]:
        """Return problems between keys that are valid one by one; paths are relative to this section."""
        return []

    def model_post_init(self, context: Any, /) -> None:
        """Raise a ``PydanticCustomError`` that carries every contradiction."""
        if problems := self.contradictions():
            refuse(problems)


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one pydantic error that carries all ``problems``, which ``explain.py`` unpacks."""
    text = "; ".join(problem.message for problem in problems)
    raise PydanticCustomError("contradiction", "{text}", {"text": text, "problems": list(problems)})


def _number(value: Any) -> Any:
    """Refuse booleans, which Python counts as integers, and NaN."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number")
    if isinstance(value, float) and math.isnan(value):
        raise PydanticCustomError("number", "must be a number")
    return value


def number_as_text(value: Any) -> Any:
    """Return an integer as a string: YAML reads ``name: 2022`` as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def listed(value: Any) -> Any:
    """Return a single name as a tuple of one."""
    return (value,) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Return a mapping as a plain dict, which can be written as YAML and JSON."""
    return dict(value) if isinstance(value, Mapping) else value


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
"""An integer of at least 1."""

Index = Annotated[int, BeforeValidator(_number), Field(ge=0)]
"""An integer of at least 0."""

Integer = Annotated[int, BeforeValidator(_number)]

Amount = Annotated[float, BeforeValidator(_number), Field(ge=0)]
"""A number that is not negative."""

Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
"""A number from 0 to 1."""

Decay = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
"""A number from 0 to just below 1, as the betas of Adam."""

Text = Annotated[str, BeforeValidator(number_as_text), Field(min_length=1)]
"""A string that is not empty."""

Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
"""A list of names; a single name is a list of one."""

Settings = Annotated[dict[str, Any], BeforeValidator(_plain)]
"""A mapping whose keys are checked by the library that takes them."""


_SPELLINGS = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def spell_dtype(value: Any) -> Any:
    """Return the name of a dtype: ``bfloat16`` for ``torch.bfloat16`` and ``bf16``."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    return _SPELLINGS.get(name, name)


def key_of(name: str, field: FieldInfo) -> str:
    """Return the key of a field in a workload file: ``class`` for ``class_``."""
    return field.serialization_alias or name


def keys(section: type[Section]) -> dict[str, FieldInfo]:
    """Return every key of a section with its field, in order."""
    return {key_of(name, field): field for name, field in section.model_fields.items()}


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section inside an annotation such as ``LoraSpec | None``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def section_at(root: type[Section], path: Path) -> type[Section] | None:
    """Return the section at ``path`` under ``root``, or None if there is none."""
    section: type[Section] | None = root
    for key in path:
        field = keys(section).get(str(key)) if section else None
        section = section_of(field.annotation) if field else None
    return section


def leaves(section: type[Section], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Yield every key that holds a value; one that may also be a section (``gpu``) comes before its keys."""
    for key, field in keys(section).items():
        inner = section_of(field.annotation)
        if inner is None or str in members(field.annotation):
            yield (*prefix, key), field
        if inner is not None:
            yield from leaves(inner, (*prefix, key))


def members(annotation: Any) -> set[type]:
    """Return all types in an annotation: tuple, str and NoneType for ``tuple[str, ...] | None``."""
    origin = get_origin(annotation)
    found = {each for each in (annotation, origin) if isinstance(each, type)}
    return found.union(*map(members, get_args(annotation)))
