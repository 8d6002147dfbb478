"""Flags over a workload: ``--per-device-train-batch-size 4`` sets ``train.per_device_train_batch_size``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError

from trainatomy.errors import WorkloadError
from trainatomy.workload.arguments import arguments
from trainatomy.workload.explain import explain
from trainatomy.workload.factory import resolve
from trainatomy.workload.flags import BY_NAME, Flag
from trainatomy.workload.nearest import suggestion
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import Path, Problem

_SWITCHED = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_FACTORY_DECIDES = ("id", "class", "config", "attn_implementation", "dtype")
_BATCH_DECIDES = ("sequence_length", "target_length", "attention_mask", "padding")
_DISPLACES: dict[Path, tuple[Path, ...]] = {
    ("model", "id"): (("model", "factory"),),
    ("model", "class"): (("model", "factory"),),
    ("model", "factory"): tuple(("model", key) for key in _FACTORY_DECIDES),
    ("data", "factory"): tuple(("data", key) for key in _BATCH_DECIDES),
    **{("data", key): (("data", "factory"),) for key in _BATCH_DECIDES},
    ("train", "fp16"): (("train", "bf16"),),
    ("train", "bf16"): (("train", "fp16"),),
    ("train", "fp16_full_eval"): (("train", "bf16_full_eval"),),
    ("train", "bf16_full_eval"): (("train", "fp16_full_eval"),),
}
"""A flag overrides what the file says even where the two could not stand together in one file."""


def merge(base: Workload | None, overrides: Mapping[str, Any]) -> Workload:
    """``base`` (or nothing) with flags over it.

    ``overrides`` goes from names (hyphens or underscores, with or without ``--``) to values, as Python's or as typed in
    a shell; None means that the flag was not given.  Names of ``TrainingArguments`` that change nothing are accepted.
    Raises ``WorkloadError`` that names the flag.
    """
    given = {_plain(name): value for name, value in overrides.items() if value is not None and value not in ((), [])}
    mapping = base.to_mapping() if base else {}
    problems, placed = [], dict[Path, Flag]()
    for name, value in given.items():
        flag = BY_NAME.get(name)
        try:
            if flag is None:
                _place(mapping, ("train", _argument(name, value)), value)
            else:
                placed[flag.path] = flag
                _place(mapping, flag.path, _read(flag, value))
        except ValueError as error:
            problems.append(f"--{name.replace('_', '-')}: {error}")
    _displace(mapping, placed)
    try:
        workload = Workload.model_validate(mapping)
    except ValidationError as error:
        problems += [_say(problem, placed) for problem in explain(error, mapping, Workload)]
    if problems:
        raise WorkloadError("\n".join(problems))
    if base:
        workload.train._ignored = tuple(dict.fromkeys((*base.train.ignored, *workload.train.ignored)))
    return workload.placed((base._places if base else {}) | {path: flag.option for path, flag in placed.items()})


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _argument(name: str, value: Any) -> str:
    """A name of ``TrainingArguments`` that is no key: accepted where it changes nothing."""
    known = arguments()
    if known.sets_aside(name, value):
        return name
    if name in known.refused:
        raise ValueError(f"not supported: {known.refused[name]}")
    if name in known.renamed:
        raise ValueError(f"is called {known.renamed[name]} today")
    raise ValueError(f"unknown flag{suggestion(name, BY_NAME)}")


def _place(mapping: dict[str, Any], path: Path, value: Any) -> None:
    """Set ``path`` in nested mappings; a mapping goes over what is there key by key."""
    here = mapping
    for key in map(str, path[:-1]):
        if key == "gpu" and isinstance(here.get(key), str):
            here[key] = {"base": here[key]}
        inner = here.get(key)
        here[key] = dict(inner) if isinstance(inner, Mapping) else {}
        here = here[key]
    last = str(path[-1])
    here[last] = _over(here.get(last), value)


def _over(below: Any, above: Any) -> Any:
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def _displace(mapping: dict[str, Any], placed: Mapping[Path, Flag]) -> None:
    """Take out what the file says and a flag replaces; two flags that contradict each other stay, and are refused."""
    for path in placed:
        section, key = str(path[0]), str(path[-1])
        if path in _DISPLACES and mapping[section].get(key) is not False:
            for other in _DISPLACES[path]:
                if other not in placed:
                    mapping[section].pop(str(other[-1]), None)


def _read(flag: Flag, value: Any) -> Any:
    """A value as typed in a shell; what is no text is taken as it is."""
    if flag.kind == "switch" and isinstance(value, str):
        return _SWITCHED.get(value.lower(), value)
    if flag.kind == "pairs":
        return value if isinstance(value, Mapping) else _pairs([value] if isinstance(value, str) else value)
    if flag.kind == "list":
        return _names(value)
    if flag.path[-1] == "factory" and isinstance(value, str):
        return resolve(value, FilePath.cwd())
    return value


def _names(value: Any) -> Any:
    """``q_proj,v_proj``, or several values; a regular expression, or ``all-linear``, stays one text."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        return [part for each in value for part in str(each).split(",")] if isinstance(value, Iterable) else value
    if value == "all-linear" or re.search(r"[\\^$*+?()\[\]{}|]", value):
        return value
    return [part for part in value.split(",") if part]


def _pairs(texts: Iterable[str]) -> dict[str, Any]:
    """``["num_labels=3", "vision_config.hidden_size=64"]`` as nested mappings; values are YAML, so 3 is a number.

    Raises ``ValueError`` for a text that is not KEY=VALUE.
    """
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, raw = str(text).partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"must look like KEY=VALUE, found {text!r}")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            raise ValueError(f"the value of {key} cannot be read: {raw!r}") from None
        _place(pairs, tuple(key.split(".")), value)
    return pairs


def _say(problem: Problem, placed: Mapping[Path, Flag]) -> str:
    """A problem with the flag that caused it, or with its key where the file did."""
    path, message = problem
    for length in range(len(path), 0, -1):
        if flag := placed.get(path[:length]):
            inner = ".".join(map(str, path[length:]))
            return f"{flag.option}: {inner}: {message}" if inner else f"{flag.option}: {message}"
    if path == ("model",):
        return "no model: give --model, or --model-class with --config, or --model-factory, or a workload file"
    return str(problem)
