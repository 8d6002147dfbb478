"""JSON Schemas of what ``--json`` prints (docs/schema/*.schema.json): pydantic derives them from the formats."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from trainatomy.reporters.json_format import ABSENT, Derived, Format, Key
from trainatomy.reporters.prediction_json import PREDICTION_2, renamed_v2
from trainatomy.results.memory import STANDARD_COMPONENTS, Components

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(format_of: Format) -> dict[str, Any]:
    """Return the schema of a format."""
    generator = type("_OfFormat", (_Generator,), {"keys": format_of.keys})
    made = TypeAdapter(format_of.kind).json_schema(schema_generator=generator, mode="serialization")
    made = _without_titles(made)
    if format_of is PREDICTION_2:
        made = renamed_v2(made)
    tagged = {"properties": {"schema": {"const": format_of.name}, **made["properties"]}}
    required = {"required": ["schema", *made["required"]]}
    definitions = dict(sorted(made.pop("$defs", {}).items()))
    return {"$schema": _DRAFT, "title": format_of.title, **made, **tagged, **required, "$defs": definitions}


class _Generator(GenerateJsonSchema):
    """Pydantic's generator for objects as a format writes them."""

    keys: dict[type, Derived]

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().dataclass_schema(schema)
        made["description"] = re.sub(r"\s+", " ", inspect.getdoc(schema["cls"]) or "").replace("``", "`")
        if schema["cls"] is Components:  # written as one flat object
            sizes = {name: {"type": "integer"} for name in STANDARD_COMPONENTS}
            made |= {"properties": sizes, "required": list(sizes), "additionalProperties": {"type": "integer"}}
        derived = self.keys.get(schema["cls"], Derived())
        first, last = ({name: self._key(key) for name, key in some.items()} for some in (derived.first, derived.last))
        made["properties"] = first | made["properties"] | last
        made["required"] = list(dict.fromkeys([*first, *made["required"], *last]))
        return made

    def _key(self, key: Key) -> JsonSchemaValue:
        """Return the schema of a constant, or of what a function returns."""
        if not callable(key):
            return {"const": key}
        return self.generate_inner(TypeAdapter(get_type_hints(key)["return"]).core_schema)

    def field_is_required(self, field: Any, total: bool) -> bool:
        return field["schema"].get("default") is not ABSENT  # every other key is written, defaults included

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def _without_titles(value: Any) -> Any:
    """Remove the titles that pydantic derives from names."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_titles(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}
