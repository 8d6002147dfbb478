"""Convert a record to a JSON document and back.

A document names its schema version.  Within a version keys may be added, but neither renamed nor removed, and a new key
has a default, so that every document of the version can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from trainatomy.errors import TrainatomyError
from trainatomy.results.memory import STANDARD_COMPONENTS, Components
from trainatomy.results.record import Record

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FAMILY = "trainatomy/record/"
VERSION = 1
SCHEMA = f"{FAMILY}{VERSION}"


def to_document(record: Record) -> bytes:
    """Return the record as UTF-8 JSON, one object with its ``schema`` first.

    Values that JSON cannot hold, such as a class that describes a live training, become text.
    """
    content = {"schema": SCHEMA, **to_plain(record)}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def to_plain(value: Any) -> Any:
    """Convert a result value to JSON types: dataclasses to objects, tuples to lists, anything else unknown to text.

    Memory components become one flat object, those of ``Components.others`` included.
    """
    if isinstance(value, Components):
        return value.as_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _gather_others(value: Any) -> Any:
    """Undo the flattening of ``Components`` in parsed JSON: move components that are not standard to ``others``."""
    if isinstance(value, list):
        return [_gather_others(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not value.keys() >= set(STANDARD_COMPONENTS):
        return {key: _gather_others(item) for key, item in value.items()}
    others = {name: size for name, size in value.items() if name not in STANDARD_COMPONENTS}
    return {**{name: value[name] for name in STANDARD_COMPONENTS}, "others": others}


def from_document(data: bytes) -> Record:
    """Return the record in ``data``.

    Raises:
        TrainatomyError: ``data`` is not JSON, not a record, of another version, or damaged.  The message continues
            "FILE: ...".
    """
    from pydantic import ValidationError

    try:
        return _adapter().validate_python(_body(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise TrainatomyError(f"damaged record: {key}: {first['msg']}{more}") from None


def _body(data: bytes) -> dict[str, Any]:
    """Return the object without its ``schema``, after checking that."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TrainatomyError(f"not JSON ({_where(error)})" if data.strip() else "empty file") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, str) or not schema.startswith(FAMILY):
        kind = f"its schema is {schema!r}" if isinstance(schema, str) else "it names no schema"
        raise TrainatomyError(f"not a record: {kind}, where a record has {SCHEMA!r}")
    if schema != SCHEMA:
        raise TrainatomyError(_other_version(schema))
    return {key: _gather_others(value) for key, value in content.items() if key != "schema"}


def _where(error: ValueError | RecursionError) -> str:
    return str(error) if isinstance(error, ValueError) else "nested too deeply"


def _other_version(schema: str) -> str:
    version = schema.removeprefix(FAMILY)
    if not version.isdecimal() or int(version) < VERSION:
        return f"a record of version {version!r}, which no trainatomy has written; this one reads version {VERSION}"
    return (
        f"a record of version {version}, and this trainatomy reads version {VERSION}: a newer one wrote it. "
        "Upgrade: pip install --upgrade trainatomy"
    )


@cache
def _adapter() -> TypeAdapter[Record]:
    from pydantic import TypeAdapter

    return TypeAdapter(Record)
