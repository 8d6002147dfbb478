"""Which keys a section has, found from the models themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_origin

from trainatomy.workload.section import Path, Section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo


def key_of(name: str, field: FieldInfo) -> str:
    """The key in a workload file for a field: ``class`` for ``class_``."""
    return field.serialization_alias or name


def keys(section: type[Section]) -> dict[str, FieldInfo]:
    """Every key of a section, in order, with its field."""
    return {key_of(name, field): field for name, field in section.model_fields.items()}


def section_of(annotation: Any) -> type[Section] | None:
    """The section inside an annotation such as ``LoraSpec | None``, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_of, get_args(annotation))), None)


def section_at(root: type[Section], path: Path) -> type[Section] | None:
    """The section that lies at ``path`` under ``root``, or None where something else lies there."""
    section: type[Section] | None = root
    for key in path:
        field = keys(section).get(str(key)) if section else None
        section = section_of(field.annotation) if field else None
    return section


def leaves(section: type[Section], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Every key that holds a value, with its path; one that may also be a section (``gpu``) comes before its keys."""
    for key, field in keys(section).items():
        inner = section_of(field.annotation)
        if inner is None or str in members(field.annotation):
            yield (*prefix, key), field
        if inner is not None:
            yield from leaves(inner, (*prefix, key))


def members(annotation: Any) -> set[type]:
    """All types that take part in an annotation; of ``tuple[str, ...] | None`` tuple, str and NoneType."""
    origin = get_origin(annotation)
    found = {each for each in (annotation, origin) if isinstance(each, type)}
    return found.union(*map(members, get_args(annotation)))
