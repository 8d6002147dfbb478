"""Workload files: YAML (or JSON, which is YAML) to ``Workload``, with the line of everything that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainatomy.errors import WorkloadError
from trainatomy.workload.document import Document, parse
from trainatomy.workload.explain import explain
from trainatomy.workload.factory import resolve
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.workload.section import Path

ROWS = "rows"
"""The key of a file that describes several workloads: each row changes what stands above it."""


def read(path: str | FilePath) -> Workload:
    """Read the one workload that a file describes.

    Relative files of factories and model folders that begin with ``./`` or ``../`` are looked for beside the file.
    Raises ``WorkloadError`` with one line a problem: ``file.yaml:7: train.fp16: ...``.
    """
    workloads = read_all(path)
    if len(workloads) != 1:
        raise WorkloadError(f"{path}: describes {len(workloads)} workloads; here one is wanted (compare takes several)")
    return workloads[0]


def read_all(path: str | FilePath) -> tuple[Workload, ...]:
    """Read every workload that a file describes: itself, or each entry of ``rows`` on top of the file's other keys."""
    path = FilePath(path)
    document = parse(_text(path), str(path))
    if not isinstance(document.value, Mapping):
        raise WorkloadError(document.error((), "a workload is a mapping of keys (model, data, train, …) to values"))
    if ROWS not in document.value:
        return _valid([_workload(document, document.value, (), path.parent)])
    rows = document.value[ROWS]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise WorkloadError(document.error((ROWS,), "must be a list of workloads, each a mapping of keys to values"))
    common = {key: value for key, value in document.value.items() if key != ROWS}
    return _valid(
        [_workload(document, overlay(common, row), (ROWS, index), path.parent) for index, row in enumerate(rows)]
    )


def _valid(read: list[Workload | list[str]]) -> tuple[Workload, ...]:
    """The workloads, or one error with everything that is wrong in any of them."""
    problems = [problem for each in read if isinstance(each, list) for problem in each]
    if problems:
        raise WorkloadError("\n".join(dict.fromkeys(problems)))
    return tuple(each for each in read if isinstance(each, Workload))


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with the values of ``above``; mappings are laid over each other key by key."""
    merged = dict(copy.deepcopy(dict(below)))
    for key, value in above.items():
        lower = merged.get(key)
        merged[key] = overlay(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return merged


def _text(path: FilePath) -> str:
    """The file's text, or the reason why there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise WorkloadError(f"{path}: is a folder; a workload is a YAML file") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: is not a text file; a workload is a YAML file") from None
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from None


def _workload(document: Document, given: Mapping[str, Any], row: Path, folder: FilePath) -> Workload | list[str]:
    """One workload, or what is wrong: shown in the row where the row has the key's section, else above the rows."""
    try:
        return Workload.model_validate(_beside(given, folder)).placed(document.places(row))
    except ValidationError as error:
        problems = explain(error, given, Workload)
        return [
            document.error((*row, *path) if not path or (*row, path[0]) in document.lines else path, message)
            for path, message in problems
        ]


def _beside(given: Mapping[str, Any], folder: FilePath) -> dict[str, Any]:
    """Relative places as absolute ones, starting from the folder of the file."""
    placed = overlay(given, {})
    for section in ("model", "data"):
        keys = placed.get(section)
        if isinstance(keys, dict) and isinstance(reference := keys.get("factory"), str):
            keys["factory"] = resolve(reference, folder)
    model = placed.get("model")
    if isinstance(model, dict) and isinstance(name := model.get("id"), str) and name.startswith(("./", "../")):
        model["id"] = str((folder / name).resolve())
    return placed
