"""JSON Schemas of what ``--json`` prints, derived from the dataclasses (docs/schema/*.schema.json).

Pydantic derives the schema of a dataclass; this module adds the ``schema`` key, and the keys and sentences that
``reporters.json`` adds to the values.

JSON Schemas of lists, of differences and of errors (see ``reporters/schema.py``).
"""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.reporters.json import (
    ARCHITECTURES,
    COMPARISON,
    DIAGNOSIS,
    DIFFERENCE,
    ERROR,
    GPUS,
    HISTORY,
    LOADER,
    MEASUREMENT,
    OPERATIONS,
    PREDICTION,
    PREDICTION_2,
    RECORD,
    SPREADS,
    PredictionV2,
    renamed_v2,
)
from trainatomy.reporters.search_json import FIT, FIT_ACROSS, SHORTAGE
from trainatomy.results.comparison import RowStatus, Spread
from trainatomy.results.fit import Change, Goal, Maximum, Permission, RemedyKind, SearchCounts
from trainatomy.results.loader import LoaderReport
from trainatomy.results.machine import Diagnosis
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import STANDARD_COMPONENTS, TOTALS, Components, Memory, OutOfMemoryPoint, Verdict
from trainatomy.results.operations import OperationBreakdown
from trainatomy.results.prediction import GPUSummary, Plan, Prediction, Subject
from trainatomy.results.record import Difference, History, Record
from trainatomy.results.time import Time

_DEFINITION = "#/$defs/{model}"
_NULL = {"type": "null"}
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}

Schema = dict[str, Any]


def prediction_schema() -> Schema:
    """Return the schema of ``predict --json``."""
    definitions: Schema = {}
    body = tagged(Prediction, PREDICTION, definitions)
    body["properties"]["shortage"] = {"type": "object", "description": "With --why-oom: as `fit --why-oom --json`."}
    return document("A prediction", body, definitions)


def prediction_schema_v2() -> Schema:
    """Return the schema of ``predict --json --json-version 2``, which is a draft."""
    definitions: Schema = {}
    body = renamed_v2(tagged(PredictionV2, PREDICTION_2, definitions))
    return document("A prediction (draft of version 2)", body, renamed_v2(definitions))


def comparison_schema() -> Schema:
    """Return the schema of ``compare --json``; keys of measured comparisons are not required."""
    definitions: Schema = {}
    definitions["Measurement"] = tagged(Measurement, MEASUREMENT, definitions)
    spread = reference_to(Spread, definitions)
    more: Schema = {
        "status": {"enum": list(get_args(RowStatus))},
        "measured": object_of({name: {"anyOf": [spread, _NULL]} for name in SPREADS}),
        "gap": object_of({name: {"type": ["number", "null"]} for name in TOTALS}),
        "measurements": {"type": "array", "items": {"$ref": "#/$defs/Measurement"}},
        "errors": {"type": "array", "items": {"type": "string"}},
        "prediction_error": {"type": "string"},
    }
    more |= {**_spreading(definitions), "cost_per_million_samples": {"type": ["number", "null"]}}
    row = tagged(Prediction, PREDICTION, definitions)
    row["properties"] |= more
    unpredicted = object_of({"name": _STRING, "workload": {"type": "object"}, "prediction_error": _STRING})
    unpredicted["properties"] |= more
    definitions |= {"Row": row, "UnpredictedRow": unpredicted}
    rows = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Row"}, {"$ref": "#/$defs/UnpredictedRow"}]}}
    sizes, times = ({"type": "array", "items": {"type": [kind, "null"]}} for kind in ("integer", "number"))
    published = object_of({"source": {"type": "string"}, "memory_bytes": sizes})
    published["properties"] |= {"samples": {"type": "integer"}, "seconds": times}
    published["properties"]["reversed"] = array_of(array_of(_STRING))
    body = object_of(
        {"schema": {"const": COMPARISON}, "subject": _STRING, "rows": rows, "published": {"anyOf": [published, _NULL]}}
    )
    body["properties"] |= {"group": {"type": "string"}, "repeats": {"type": "integer"}}
    return document("A comparison", body, definitions)


def _spreading(definitions: Schema) -> Schema:
    """Return what a row says of several GPUs."""
    rates = dict.fromkeys(("samples_per_second", "samples_per_second_per_gpu"), _NUMBER)
    scaling = object_of({**rates, "efficiency": {"type": ["number", "null"]}})
    return {"plan": _plan(definitions), "scaling": _or_null(scaling)}


def _plan(definitions: Schema) -> Schema:
    """Return the schema of a plan of parallelism with its name."""
    plan = _dataclass(Plan, definitions)
    plan["properties"] = {"name": _STRING, **plan["properties"]}
    plan["required"] = ["name", *plan["required"]]
    return plan


def measurement_schema() -> Schema:
    """Return the schema of ``measure --json``."""
    definitions: Schema = {}
    definitions["Prediction"] = tagged(Prediction, PREDICTION, definitions)
    body = tagged(Measurement, MEASUREMENT, definitions)
    shares = {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
    compared: Schema = {name: {"type": ["number", "null"]} for name in TOTALS}
    gap = object_of({**compared, "components": shares})
    gap["properties"]["ranks"] = {"type": "object", "additionalProperties": object_of(compared)}
    maybe: Schema = {"type": ["number", "null"]}
    at_pace = object_of({"pace": _NUMBER, "step_seconds": maybe, "gap": maybe, "quiet_step_seconds": _NUMBER})
    body["properties"] |= {
        "prediction": {"anyOf": [{"$ref": "#/$defs/Prediction"}, _NULL]},
        "gap": {"anyOf": [gap, _NULL]},
        "at_host_pace": _or_null(at_pace),
    }
    body["required"] += ["prediction", "gap", "at_host_pace"]
    return document("A measurement", body, definitions)


def record_schema() -> Schema:
    """Return the schema of a record's file and of ``show --json``."""
    definitions: Schema = {}
    return document("A record", tagged(Record, RECORD, definitions), definitions)


def loader_schema() -> Schema:
    """Return the schema of ``data --json``."""
    definitions: Schema = {}
    return document("A timed loader", tagged(LoaderReport, LOADER, definitions), definitions)


def operations_schema() -> Schema:
    """Return the schema of ``ops --json``."""
    definitions: Schema = {}
    body = tagged(OperationBreakdown, OPERATIONS, definitions)
    for name, key in (("Claim", "sentence"), ("Padding", "how")):
        definitions[name]["properties"][key] = {"type": "string"}
        definitions[name]["required"].append(key)
    return document("The operations of a step", body, definitions)


def diagnosis_schema() -> Schema:
    """Return the schema of ``doctor --json``."""
    definitions: Schema = {}
    body = tagged(Diagnosis, DIAGNOSIS, definitions)
    body["properties"]["healthy"] = _BOOLEAN
    body["required"].append("healthy")
    for name, keys in (("Cost", ("sentence",)), ("Finding", ("found", "means", "fix"))):
        definitions[name]["properties"] |= dict.fromkeys(keys, _STRING)
        definitions[name]["required"] += keys
    return document("What is wrong with a machine", body, definitions)


def fit_schema() -> Schema:
    """Return the schema of ``fit --json``."""
    definitions: Schema = {}
    short, whole = _candidate(definitions, whole=False), _candidate(definitions, whole=True)
    change, listed = {"$ref": "#/$defs/Change"}, array_of(short)
    figures = {"device_bytes": _INTEGER, "step_seconds": _NUMBER}
    prices = object_of(
        {"change": change, "candidate": _or_null(short), "allowed": _BOOLEAN, **figures, "error": _STRING}
    )
    maximum = _or_null(reference_to(Maximum, definitions))
    limits = {"gpu_memory_bytes": _INTEGER, "headroom": _NUMBER, "usable_bytes": _INTEGER, "maximum": maximum}
    texts = object_of(dict.fromkeys(("training_arguments", "yaml", "flags"), _STRING) | {"launch": _or_null(_STRING)})
    compared = {"type": ["object", "null"], "description": "The measured candidates, as `compare --measure --json`."}
    body = {
        "schema": {"const": FIT},
        "name": _STRING,
        "subject": _STRING,
        "workload": {"type": "object"},
        "gpu": reference_to(GPUSummary, definitions),
        "goal": {"enum": list(get_args(Goal))},
        "effective_batch_size": _INTEGER,
        "allowed": array_of({"enum": list(get_args(Permission))}),
        "best": _or_null(whole),
        "given": _or_null(short),
        "candidates": listed,
        "by_gpus": listed,
        "ties": listed,
        "prices": array_of(prices),
        "remedies": array_of(_remedy(definitions)),
        "front": listed,
        "too_large": listed,
        "limits": object_of(limits),
        "counts": reference_to(SearchCounts, definitions),
        "settings": _or_null(texts),
        "measured": compared,
        "notes": array_of(_STRING),
        "interrupted": _BOOLEAN,
        "versions": {"type": "object", "additionalProperties": _STRING},
    }
    return document("Settings that fit a GPU", object_of(body), definitions)


def fit_across_schema() -> Schema:
    """Return the schema of ``fit --gpu all --json``."""
    definitions: Schema = {}
    option = {
        "gpu": reference_to(GPUSummary, definitions),
        "usable_bytes": _INTEGER,
        "best": _or_null(_candidate(definitions, whole=True)),
        "smallest": _or_null(_candidate(definitions, whole=False)),
        "missing_bytes": {"type": ["integer", "null"]},
        "cost_per_hour": {"type": ["number", "null"]},
        "cost_per_million_samples": {"type": ["number", "null"]},
        "counts": reference_to(SearchCounts, definitions),
        "notes": array_of(_STRING),
    }
    body = {
        "schema": {"const": FIT_ACROSS},
        "name": _STRING,
        "workload": {"type": "object"},
        "effective_batch_size": _INTEGER,
        "headroom": _NUMBER,
        "allowed": array_of({"enum": list(get_args(Permission))}),
        "options": array_of(object_of(option)),
        "refused": array_of(_STRING),
        "seconds": _NUMBER,
        "interrupted": _BOOLEAN,
    }
    return document("Settings that fit several GPUs", object_of(body), definitions)


def shortage_schema() -> Schema:
    """Return the schema of ``fit --why-oom --json``."""
    definitions: Schema = {}
    body = {
        "schema": {"const": SHORTAGE},
        "name": _STRING,
        "gpu": reference_to(GPUSummary, definitions),
        "given": _candidate(definitions, whole=True),
        "out_of_memory": _or_null(reference_to(OutOfMemoryPoint, definitions)),
        "usable_bytes": _INTEGER,
        "missing_bytes": _INTEGER,
        "headroom": _NUMBER,
        "remedies": array_of(_remedy(definitions)),
        "seconds": _NUMBER,
        "interrupted": _BOOLEAN,
        "versions": {"type": "object", "additionalProperties": _STRING},
    }
    return document("What a training needs that does not fit", object_of(body), definitions)


def _remedy(definitions: Schema) -> Schema:
    return object_of(
        {
            "kind": {"enum": list(get_args(RemedyKind))},
            "gpu": reference_to(GPUSummary, definitions),
            "changes": array_of({"$ref": "#/$defs/Change"}),
            "candidate": _candidate(definitions, whole=False),
            "device_bytes": _INTEGER,
            "step_seconds": {"type": ["number", "null"]},
        }
    )


def _candidate(definitions: Schema, *, whole: bool) -> Schema:
    """Add the schema of a candidate, with its whole memory breakdown or three totals, and return a reference to it."""
    reference_to(Change, definitions)
    definitions["Change"]["properties"]["may_change"] = _STRING
    definitions["Change"]["required"].append("may_change")
    time = reference_to(Time, definitions)
    interval = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
    definitions["Time"]["properties"]["samples_per_second_interval"] = interval
    definitions["Time"]["required"].append("samples_per_second_interval")
    totals = object_of(dict.fromkeys(TOTALS, _INTEGER))
    name = "Best" if whole else "Candidate"
    definitions[name] = object_of(
        {
            "changes": array_of({"$ref": "#/$defs/Change"}),
            "workload": {"type": "object"},
            "plan": _plan(definitions),
            "fits": _BOOLEAN,
            "verdict": {"enum": list(get_args(Verdict))},
            "room_bytes": _INTEGER,
            "memory": reference_to(Memory, definitions) if whole else totals,
            "time": _or_null(time),
            "samples_per_second": _or_null(_NUMBER),
        }
    )
    return {"$ref": f"#/$defs/{name}"}


def _duration() -> Schema:
    """Return the schema of how long a whole training takes, where that is known."""
    interval = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}
    counts = {"steps": _INTEGER, "evaluations": {"type": ["integer", "null"]}}
    return _or_null(object_of({**counts, "seconds": _NUMBER, "interval_seconds": interval}))


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def array_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


class _Generator(GenerateJsonSchema):
    """Pydantic's generator with components as the flat object that they are written as."""

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().dataclass_schema(schema)
        made["description"] = re.sub(r"\s+", " ", inspect.getdoc(schema["cls"]) or "").replace("``", "`")
        if schema["cls"] is Components:
            integer = {"type": "integer"}
            made |= {**object_of(dict.fromkeys(STANDARD_COMPONENTS, integer)), "additionalProperties": integer}
        if schema["cls"] is Prediction:
            made["properties"]["duration"] = _duration()
        return made

    def field_is_required(self, field: Any, total: bool) -> bool:
        return True  # every key is written, defaults included

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def _dataclass(kind: type, definitions: Schema) -> Schema:
    """Return the schema of a dataclass, and add those that it refers to to ``definitions``."""
    made = TypeAdapter(kind).json_schema(ref_template=_DEFINITION, schema_generator=_Generator, mode="serialization")
    definitions |= _without_titles(made.pop("$defs", {}))
    body: Schema = _without_titles(made)
    return body


def _without_titles(value: Any) -> Any:
    """Remove the titles that pydantic derives from names."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_titles(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}


def reference_to(kind: type, definitions: Schema) -> Schema:
    definitions[kind.__name__] = _dataclass(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def document(title: str, body: Schema, definitions: Schema) -> Schema:
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": title, **body, "$defs": dict(sorted(definitions.items()))}


def tagged(kind: type, name: str, definitions: Schema) -> Schema:
    """Return the schema of a dataclass with its ``schema`` key in front."""
    body = _dataclass(kind, definitions)
    body["properties"] = {"schema": {"const": name}, **body["properties"]}
    body["required"] = ["schema", *body["required"]]
    if kind is Prediction:
        body["properties"]["subject"] = _subject(definitions)
    return body


def _subject(definitions: Schema) -> Schema:
    """Return the schema of what was predicted, with the line that pages show."""
    subject = _dataclass(Subject, definitions)
    subject["properties"] = {"line": _STRING, **subject["properties"]}
    subject["required"] = ["line", *subject["required"]]
    definitions["Subject"] = subject
    return _or_null({"$ref": "#/$defs/Subject"})


def object_of(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def gpus_schema() -> Schema:
    """Return the schema of ``gpus --json``."""
    definitions: Schema = {}
    rows = array_of(reference_to(GPU, definitions))
    return document("GPUs", object_of({"schema": {"const": GPUS}, "rows": rows}), definitions)


def architectures_schema() -> Schema:
    """Return the schema of ``models --json``."""
    definitions: Schema = {}
    rows = array_of(reference_to(ArchitectureEntry, definitions))
    return document("Architectures", object_of({"schema": {"const": ARCHITECTURES}, "rows": rows}), definitions)


def history_schema() -> Schema:
    """Return the schema of ``history --json``."""
    definitions: Schema = {}
    return document("Measured runs", tagged(History, HISTORY, definitions), definitions)


def difference_schema() -> Schema:
    """Return the schema of ``diff --json``."""
    definitions: Schema = {}
    body = tagged(Difference, DIFFERENCE, definitions)
    for name, key, kind in (("MemoryChange", "change", "integer"), ("SpeedChange", "ratio", "number")):
        definitions[name]["properties"][key] = {"type": [kind, "null"]}
        definitions[name]["required"].append(key)
    return document("The difference between two measured runs", body, definitions)


def error_schema() -> Schema:
    """Return the schema of what a command with ``--json`` prints when it fails."""
    text = {"type": "string"}
    error = object_of({"exit_code": {"type": "integer"}, "kind": text, "message": text})
    return document("An error", object_of({"schema": {"const": ERROR}, "error": error}), {})
