"""Create the record of a measurement.

Convert a record to a JSON document and back.

A document names its schema version.  Within a version keys may be added, but neither renamed nor removed, and a new key
has a default, so that every document of the version can be read.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainatomy.errors import TrainatomyError
from trainatomy.option import shared_fields
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import STANDARD_COMPONENTS, Components
from trainatomy.results.prediction import Prediction
from trainatomy.results.record import Record, Summary

FAMILY = "trainatomy/record/"
VERSION = 1
SCHEMA = f"{FAMILY}{VERSION}"


def to_document(record: Record) -> bytes:
    """Return the record as UTF-8 JSON, one object with its ``schema`` first.

    Values that JSON cannot hold, such as a class that describes a live training, become text.
    """
    content = {"schema": SCHEMA, **to_plain(record)}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _field_values(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def to_plain(value: Any, keys_of: Callable[[Any], Mapping[str, Any]] = _field_values) -> Any:
    """Convert a result value to JSON types: dataclasses to objects, tuples to lists, anything else unknown to text.

    Memory components become one flat object, those of ``Components.others`` included.

    Args:
        value: The value.
        keys_of: Returns the keys of a dataclass with their values; its fields by default.
    """
    if isinstance(value, Components):
        return value.as_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {key: to_plain(item, keys_of) for key, item in keys_of(value).items()}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, keys_of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, keys_of) for item in value]
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
    return TypeAdapter(Record)


KEY_DIGITS = 4
"""Digits of its key in a record's id, so that a search need not open every file."""


def make_record(
    measurement: Measurement,
    prediction: Prediction | None,
    command: str,
    group: str = "",
    repeat: int = 0,
    *,
    steps: int | None = None,
    components: bool = True,
) -> Record:
    """Return a record, created now, of ``measurement`` and of the ``prediction`` of the same workload.

    Args:
        measurement: The measurement.
        prediction: The prediction, if there is one.
        command: The command that requested the measurement.
        group: See ``Record``.
        repeat: See ``Record``.
        steps: See ``key_of``; to find the record later, pass the same there.
        components: See ``key_of``.
    """
    now = datetime.now(UTC)
    key = key_of(measurement.workload, steps=steps, components=components)
    return Record(
        id=new_id(now, key),
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
        group=group,
        repeat=repeat,
        key=key,
        measurement=measurement,
        prediction=prediction,
    )


def new_id(now: datetime, key: str) -> str:
    """Return an id such as ``20261121-122005481-3fa9c1b7``.

    It is UTC to the millisecond, then the first digits of the key and four random ones, which distinguish equal runs
    that end at the same time.
    """
    return f"{now:%Y%m%d-%H%M%S}{now.microsecond // 1000:03d}-{key[:KEY_DIGITS]}{secrets.token_hex(2)}"


def key_of(workload: Mapping[str, object], *, steps: int | None = None, components: bool = True) -> str:
    """Return a hash of a requested run, by which an interrupted comparison finds the runs that it already has.

    The result of the run (status, steps, versions) is not part of it.

    Args:
        workload: The mapping of a workload file; its ``name`` does not count.
        steps: Requested optimizer steps (``None``: as the workload says).
        components: Whether memory by component was requested.

    Returns:
        SHA-256 (hex) of the canonical JSON.
    """
    content = {key: value for key, value in workload.items() if key != "name"}
    canonical = json.dumps([content, steps, components], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def summarize(record: Record, file: str = "") -> Summary:
    """Return the record's row in a history; ``file``: where the record is."""
    measured, prediction = record.measurement, record.prediction
    predicted = prediction.memory.device_bytes if prediction else None
    comparable = measured.status == "completed" and predicted is not None
    return Summary(
        **shared_fields(Summary, record),
        **shared_fields(Summary, measured),
        file=file,
        predicted_device_bytes=predicted,
        gap=predicted / measured.device_bytes - 1 if comparable and predicted and measured.device_bytes else None,
    )
