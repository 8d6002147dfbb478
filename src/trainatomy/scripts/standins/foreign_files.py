"""Paths that Python hands to libraries in other languages, which open them by themselves (``foreign_files.yaml``)."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from trainatomy.catalog.files import read_yaml
from trainatomy.scripts.files import RedirectedFiles
from trainatomy.scripts.guard import in_database
from trainatomy.scripts.imports import replace_everywhere
from trainatomy.scripts.standins.notes import StandIns

_IN_MEMORY = (":memory:", "")
_ADDRESS = re.compile(r"(?!file:)[\w+]+://")
"""What is no path of this machine."""


def install(stand_ins: StandIns) -> None:
    """Redirect the functions of the libraries that are imported, and of those that will be."""
    for name, functions in read_yaml("foreign_files.yaml").items():
        stand_ins.when(name, partial(_redirect, stand_ins, functions))


def _redirect(stand_ins: StandIns, functions: Mapping[str, Any], module: Any) -> None:
    files = stand_ins.files
    redirections: dict[str, Callable[..., Any]] = dict.fromkeys(functions.get("reads", ()), partial(_reading, files))
    redirections |= {name: partial(_writing, files, place) for name, place in functions.get("writes", {}).items()}
    redirections |= {name: partial(_opening, files, place) for name, place in functions.get("opens", {}).items()}
    everywhere: list[tuple[Any, Any]] = []  # put in place at once, as each look through all modules takes a while
    for name, redirection in redirections.items():
        owner, _, method = name.rpartition(".")
        holder = getattr(module, owner, None) if owner else module
        original = getattr(holder, method, None)
        if original is None:
            continue  # another version of the library
        if isinstance(original, type):
            everywhere += _redirect_class(stand_ins, original, redirection)
        elif isinstance(holder, type):
            is_static = isinstance(inspect.getattr_static(holder, method), staticmethod)
            changed = _with_paths(original, redirection, 0 if is_static else 1)
            stand_ins.put(holder, method, staticmethod(changed) if is_static else changed)
        else:
            everywhere.append((original, _with_paths(original, redirection)))
    if everywhere:
        replace_everywhere(stand_ins.stack, everywhere)


def _redirect_class(stand_ins: StandIns, original: Any, redirection: Any) -> list[tuple[Any, Any]]:
    """Redirect the arguments of a class: in its ``__init__``, or where it is written in C, by a class below it.

    Returns:
        The class and the one that is to take its place, if there is one.
    """
    if "__init__" in vars(original) and _can_change(original):
        stand_ins.put(original, "__init__", _with_paths(original.__init__, redirection, 1))
        return []

    def make(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        return original.__new__(cls, *arguments, **keywords)

    content = {"__new__": _with_paths(make, redirection, 1), "__module__": original.__module__}
    return [(original, type(original.__name__, (original,), content))]


def _can_change(kind: Any) -> bool:
    """Return whether attributes of a class can be set: it is written in Python."""
    return bool(kind.__flags__ & 1 << 9)


def _with_paths(original: Any, redirection: Any, first: int = 0) -> Any:
    """Return a function that is called with redirected paths; the first arguments, ``self``, stay."""

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        changed, keywords = redirection(list(arguments[first:]), keywords)
        return original(*arguments[:first], *changed, **keywords)

    return call


def _reading(
    files: RedirectedFiles, arguments: list[Any], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Replace every path that the script wrote."""
    return [_found(files, each) for each in arguments], {name: _found(files, each) for name, each in keywords.items()}


def _found(files: RedirectedFiles, value: Any) -> Any:
    if isinstance(value, list | tuple) and all(isinstance(each, str | os.PathLike) for each in value):
        return type(value)(_found(files, each) for each in value)
    return files.found(value) or value


def _writing(
    files: RedirectedFiles, place: int, arguments: list[Any], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Replace the path at a position, or the first keyword that may be one."""
    if len(arguments) > place:
        arguments[place] = _changed(files, arguments[place])
        return arguments, keywords
    name = next((name for name, value in keywords.items() if isinstance(value, str | os.PathLike)), None)
    return arguments, keywords if name is None else {**keywords, name: _changed(files, keywords[name])}


def _changed(files: RedirectedFiles, value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or _ADDRESS.match(text := os.fspath(value)) or text in _IN_MEMORY:
        return value
    before, path, after = in_database(text)
    if not path:
        return value
    target = files.to_write(path, keeps=True)
    return f"{before}{quote(target)}{after}" if before else target


def _opening(
    files: RedirectedFiles, place: int, arguments: list[Any], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Replace a path that is read or written, as the mode says."""
    mode = arguments[place + 1] if len(arguments) > place + 1 else keywords.get("mode", "r")
    if isinstance(mode, str) and set(mode) & set("wax+"):
        return _writing(files, place, arguments, keywords)
    return _reading(files, arguments, keywords)
