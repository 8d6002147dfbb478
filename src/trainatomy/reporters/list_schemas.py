"""JSON Schemas of lists, of differences and of errors (see ``reporters/schema.py``)."""

from __future__ import annotations

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.reporters.json import ARCHITECTURES, DIFFERENCE, ERROR, GPUS, HISTORY
from trainatomy.reporters.schema import Schema, array_of, document, object_of, reference_to, tagged
from trainatomy.results.difference import Difference
from trainatomy.results.record import History


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
