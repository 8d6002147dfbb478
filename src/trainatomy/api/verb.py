"""Verbs: functions whose keywords are the fields of a request.

A verb is written with one parameter ``request``, and with what no request has: what it is about, and callbacks.  It is
called with the fields of the request as keywords; ``help`` shows them with their types, defaults and descriptions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from trainatomy.errors import WorkloadError
from trainatomy.option import Option, as_it_is

Result = TypeVar("Result")
_ENTRY = r"^    ({name}): (.*(?:\n     .*)*)\n?"
"""A parameter or an attribute with its description in a docstring."""


def verb(
    request: type[Any], *, only: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Give a function the fields of a request as keywords, besides its keyword ``request``, which takes a whole one.

    Their values are read as those of the options on the command line.

    Args:
        request: The request.
        only: The fields (default: all).
        without: Fields that are left out.
    """
    kinds = get_type_hints(request)
    keywords = {
        field.name: _keyword(field, kinds[field.name])
        for field in fields(request)
        if (not only or field.name in only) and field.name not in without
    }

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(function)
        def called(*arguments: Any, **given: Any) -> Result:
            if given.get("request") is not None:
                _refuse_others(given["request"], request, keywords)
                return function(*arguments, **given)
            asked = {name: given.pop(name) for name in keywords if name in given}
            read = {name: None if value is None else keywords[name][1](value) for name, value in asked.items()}
            return function(*arguments, **{**given, "request": request(**read)})

        signature = inspect.signature(function)
        asked = [parameter for parameter, _ in keywords.values()]
        asked.append(signature.parameters["request"].replace(default=None, annotation=request | None))
        parameters = [
            parameter
            for name, own in signature.parameters.items()
            for parameter in (asked if name == "request" else [own])
        ]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__doc__ = _documented(function, request, keywords)
        return called

    return decorate


def _refuse_others(given: Any, request: type[Any], keywords: Collection[str]) -> None:
    """Raise ``WorkloadError`` for options of a whole request that the verb does not take."""
    for field in fields(request):
        if "option" in field.metadata and field.name not in keywords and getattr(given, field.name) != field.default:
            raise WorkloadError(f"{field.name}: this is no option of what was called; leave it out of the request")


def _keyword(field: Field[Any], kind: Any) -> tuple[inspect.Parameter, Callable[[Any], Any]]:
    """Return the keyword of a field, whose type is as wide as what is read, and the function that reads its value."""
    option: Option | None = field.metadata.get("option")
    is_tuple = get_origin(kind) is tuple
    if is_tuple:
        kind = Sequence[get_args(kind)[0]]  # type: ignore[misc]
    for words in (get_args(option.words) or (option.words,)) if option else ():
        if words not in (None, NoneType):
            kind |= str if get_origin(words) is list else words
    if Path in get_args(kind):
        kind |= str
    read = option.read if option and option.read else tuple if is_tuple else as_it_is
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kind), read


def _documented(function: Callable[..., Any], request: type[Any], names: Collection[str]) -> str:
    """Return the documentation of a function with that of the fields in place of that of ``request``."""
    texts = [inspect.cleandoc(kind.__dict__.get("__doc__") or "") for kind in reversed(request.__mro__)]
    told = {name: meant for text in texts for name, meant in re.findall(_ENTRY.format(name=r"\w+"), text, re.MULTILINE)}
    entries = "".join(f"    {name}: {told[name]}\n" for name in names)
    entries += f"    request: A whole ``{request.__name__}``, in place of its fields.\n"
    return re.sub(_ENTRY.format(name="request"), lambda _: entries, inspect.getdoc(function) or "", flags=re.MULTILINE)
