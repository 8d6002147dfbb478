"""The JSON Schema of what ``--json`` prints, derived from the dataclasses themselves (docs/schema/*.schema.json)."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trainatomy.reporters.json import COMPARED, COMPARISON, MEASUREMENT, PREDICTION, RECORD, SPREADS
from trainatomy.results.comparison import RowStatus, Spread
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import STANDARD_COMPONENTS, Components
from trainatomy.results.prediction import Prediction
from trainatomy.results.record import Record

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}


def prediction_schema() -> dict[str, Any]:
    """Of one prediction."""
    definitions: dict[str, Any] = {}
    return _document("A prediction", _tagged(Prediction, PREDICTION, definitions), definitions)


def comparison_schema() -> dict[str, Any]:
    """Of ``compare --json``; keys that only a measured comparison has are not required."""
    definitions: dict[str, Any] = {}
    definitions["Measurement"] = _tagged(Measurement, MEASUREMENT, definitions)
    spread = _of(Spread, definitions)
    nothing = {"type": "null"}
    more: dict[str, Any] = {
        "status": {"enum": list(get_args(RowStatus))},
        "measured": _object({name: {"anyOf": [spread, nothing]} for name in SPREADS}),
        "gap": _object({name: {"type": ["number", "null"]} for name in COMPARED}),
        "measurements": {"type": "array", "items": {"$ref": "#/$defs/Measurement"}},
        "errors": {"type": "array", "items": {"type": "string"}},
        "prediction_error": {"type": "string"},
    }
    row = _tagged(Prediction, PREDICTION, definitions)
    row["properties"] |= more
    unpredicted = _object({"name": {"type": "string"}, "workload": {"type": "object"}, **more})
    definitions |= {"Row": row, "UnpredictedRow": unpredicted}
    rows = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Row"}, {"$ref": "#/$defs/UnpredictedRow"}]}}
    published = _object({"source": {"type": "string"}, "memory_bytes": {"type": "array", "items": {"type": "integer"}}})
    properties = {"schema": {"const": COMPARISON}, "rows": rows, "published": {"anyOf": [published, nothing]}}
    body = _object(properties)
    body["properties"] |= {"group": {"type": "string"}, "repeats": {"type": "integer"}}
    return _document("A comparison", body, definitions)


def measurement_schema() -> dict[str, Any]:
    """Of ``measure --json``."""
    definitions: dict[str, Any] = {}
    definitions["Prediction"] = _tagged(Prediction, PREDICTION, definitions)
    body = _tagged(Measurement, MEASUREMENT, definitions)
    shares = {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
    gap = _object({**{name: {"type": ["number", "null"]} for name in COMPARED}, "components": shares})
    body["properties"] |= {
        "prediction": {"anyOf": [{"$ref": "#/$defs/Prediction"}, {"type": "null"}]},
        "gap": {"anyOf": [gap, {"type": "null"}]},
    }
    body["required"] += ["prediction", "gap"]
    return _document("A measurement", body, definitions)


def record_schema() -> dict[str, Any]:
    """Of the file of one record, and of ``show --json``."""
    definitions: dict[str, Any] = {}
    return _document("A record", _tagged(Record, RECORD, definitions), definitions)


def _document(title: str, body: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    return {"$schema": DRAFT, "title": title, **body, "$defs": dict(sorted(definitions.items()))}


def _tagged(kind: type, name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a dataclass with its ``schema`` key in front."""
    body = _dataclass(kind, definitions)
    body["properties"] = {"schema": {"const": name}, **body["properties"]}
    body["required"] = ["schema", *body["required"]]
    return body


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _dataclass(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    body = _object({field.name: _of(hints[field.name], definitions) for field in fields(kind)})
    return _dataclass_body(kind, body["properties"])


def _dataclass_body(kind: type, properties: dict[str, Any]) -> dict[str, Any]:
    return {"description": re.sub(r"\s+", " ", inspect.getdoc(kind) or "").replace("``", "`"), **_object(properties)}


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one annotation; raises ``TypeError`` for one that JSON has no word for."""
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is object or hint is Any:
        return {}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if isinstance(hint, UnionType):
        return {"anyOf": [_of(each, definitions) for each in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if origin is tuple:
        return _tuple(arguments, definitions)
    if is_dataclass(hint) and isinstance(hint, type):
        if hint is Components:
            definitions["Components"] = _components()
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = _dataclass(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    raise TypeError(f"no JSON type is known for {hint!r}")


def _components() -> dict[str, Any]:
    """Return the schema of the flat object that components are written as."""
    body = _dataclass_body(Components, {name: {"type": "integer"} for name in STANDARD_COMPONENTS})
    return {**body, "additionalProperties": {"type": "integer"}}


def _tuple(arguments: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], definitions)}
    items = [_of(each, definitions) for each in arguments]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
