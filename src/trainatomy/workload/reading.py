"""Workload files: YAML (or JSON, which is YAML) to ``Workload``, with the line of everything that is wrong.

Configurations and commands of other frameworks are read as well (``dialects``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError
from trainatomy.workload.dialects.recognise import command_in, dialect_of, read_command, read_configuration
from trainatomy.workload.document import Document, parse
from trainatomy.workload.factory import REFERENCES, resolve
from trainatomy.workload.overlay import overlay
from trainatomy.workload.overrides import RawWorkload, validate_all

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload
    from trainatomy.workload.section import Path

_FILE_SUFFIXES = (".yaml", ".yml", ".json", ".py")
ROWS = "rows"
"""The key of a file that describes several workloads: each row changes what stands above it."""


def read(path: str | FilePath, flags: Mapping[str, Any] | None = None) -> Workload:
    """Read the one workload that a file describes.

    Relative paths of factories and of DeepSpeed's configuration, and of model folders that begin with ``./`` or
    ``../``, start from the file's folder.

    Args:
        path: The file: a workload, a configuration of another framework, or a script of the shell with its command;
            or such a command itself, ``trl sft --config sft.yaml``.
        flags: Command-line flags to lay over it (see ``RawWorkload.with_flags``).

    Raises:
        WorkloadError: One line for each problem, such as ``file.yaml:7: train.fp16: ...``.
    """
    return _only(read_raw(path), str(path)).with_flags(flags or {}).validate()


def read_text(text: str, flags: Mapping[str, Any] | None = None) -> Workload:
    """Read the one workload that a text describes: a file by its name, a command, or the content of a file.

    Args:
        text: The text; paths in it start from the current folder.
        flags: Command-line flags to lay over it.

    Raises:
        WorkloadError: As ``read``.
    """
    if "\n" not in text.strip() and ": " not in text:
        return read(text.strip(), flags)
    raw = _in_document(text, "the training", FilePath.cwd())
    return _only(raw, "the training").with_flags(flags or {}).validate()


def _only(raw: list[RawWorkload], source: str) -> RawWorkload:
    """Return the one workload of a source.

    Raises:
        WorkloadError: There are several; or what is wrong with them.
    """
    if len(raw) != 1:
        validate_all(raw)
        raise WorkloadError(
            f"{source}: describes {len(raw)} workloads, but one is needed here; `trainatomy compare` takes several"
        )
    return raw[0]


def read_all(path: str | FilePath, flags: Mapping[str, Any] | None = None) -> tuple[Workload, ...]:
    """Read every workload that a file describes: itself, or each entry of ``rows`` over the file's other keys.

    Arguments and errors are those of ``read``.
    """
    return validate_all(raw.with_flags(flags or {}) for raw in read_raw(path))


def read_raw(path: str | FilePath) -> list[RawWorkload]:
    """Read every workload that a file describes, without validating it."""
    if " " in str(path) and not FilePath(path).exists() and command_in(str(path)) is not None:
        return [read_command(str(path), FilePath.cwd())]
    path = FilePath(path)
    text = _text(path)
    if path.suffix == ".sh":
        return [read_command(text, path.parent, str(path))]
    return _in_document(text, str(path), path.parent)


def _in_document(text: str, source: str, folder: FilePath) -> list[RawWorkload]:
    """Read every workload that the content of a file describes; ``folder``: where paths in it start."""
    document = parse(text, source)
    content = document.value
    if not isinstance(content, Mapping):
        raise WorkloadError(document.error((), "a workload is a mapping of keys (model, data, train, …) to values"))
    if table := dialect_of(content):
        return [read_configuration(document, table, folder, text)]
    if ROWS not in content:
        return [_raw_workload(document, content, (), folder)]
    rows = content[ROWS]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise WorkloadError(document.error((ROWS,), "must be a list of workloads, each a mapping of keys to values"))
    common = {key: value for key, value in content.items() if key != ROWS}
    return [_raw_workload(document, overlay(common, row), (ROWS, index), folder) for index, row in enumerate(rows)]


def _model_hint(path: FilePath) -> str:
    """Return a suggestion where a missing file looks like the name of a model: ``gpt2``, ``google-bert/bert-base``."""
    return "" if path.suffix in _FILE_SUFFIXES else f"; for a model of that name write --model {path}"


def _text(path: FilePath) -> str:
    """Return the text of a file, or raise WorkloadError with the reason why it cannot be read."""
    if path.suffix == ".py":
        raise WorkloadError(
            f"{path}: is a Python script; a workload is a YAML file. To predict what the script trains, use "
            f"`trainatomy run {path}`. To predict a model that it builds, pass --model-factory {path}:FUNCTION (and "
            f"--data-factory {path}:FUNCTION for its batch)"
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise WorkloadError(f"{path}: no such file{_model_hint(path)}") from error
    except IsADirectoryError:
        raise WorkloadError(f"{path}: is a folder; a workload is a YAML file") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path}: is not a text file; a workload is a YAML file") from None
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from None


def _raw_workload(document: Document, mapping: Mapping[str, Any], row: Path, folder: FilePath) -> RawWorkload:
    """Return a workload of a file; problems are shown in its row if the row has the key, else above the rows."""

    def describe(path: Path, message: str) -> str:
        is_in_row = not path or (*row, path[0]) in document.lines
        return document.error((*row, *path) if is_in_row else path, message)

    return RawWorkload(_normalized(mapping, folder), document.places(row), describe=describe)


def _normalized(mapping: Mapping[str, Any], folder: FilePath) -> dict[str, Any]:
    """Return a copy with absolute paths, which start from the file's folder, and with ``class`` for ``class_``."""
    copied: dict[str, Any] = overlay({}, mapping)
    for section in ("model", "data"):
        keys = copied.get(section)
        if not isinstance(keys, dict):
            continue
        for key in REFERENCES:
            if isinstance(reference := keys.get(key), str):
                keys[key] = resolve(reference, folder)
    train = copied.get("train")
    if isinstance(train, dict) and isinstance(file := train.get("deepspeed"), str) and (folder / file).is_file():
        train["deepspeed"] = str((folder / file).resolve())
    data = copied.get("data")
    if isinstance(data, dict):
        data.update({key: _beside(folder, data[key]) for key in ("lengths",) if key in data})
    model = copied.get("model")
    if isinstance(model, dict):
        if isinstance(name := model.get("id"), str) and name.startswith(("./", "../")):
            model["id"] = str((folder / name).resolve())
        if "class_" in model and "class" not in model:
            model["class"] = model.pop("class_")
    return copied


def _beside(folder: FilePath, lengths: Any) -> Any:
    """Return ``data.lengths`` with the path of its file starting from ``folder``."""
    if isinstance(lengths, str):
        return str(folder / FilePath(lengths).expanduser())
    if isinstance(lengths, dict) and isinstance(file := lengths.get("file"), str):
        return {**lengths, "file": str(folder / FilePath(file).expanduser())}
    return lengths
