"""Reading the data files of this package, installed or from a checkout."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(*path: str) -> str:
    """Return the text of a data file below this package; raises ``FileNotFoundError``."""
    return files(__package__).joinpath(*path).read_text(encoding="utf-8")


@cache
def read_yaml(*path: str) -> Any:
    """Return the contents of a YAML file below this package, read once; treat them as read-only."""
    return parse_yaml(read_text(*path))


def parse_yaml(text: str) -> Any:
    """Return the content of YAML that ships with this package, by libyaml where it is installed: ten times as fast."""
    return yaml.load(text, Loader=_Loader)


def close_names(name: str, known: Iterable[str], count: int = 4) -> list[str]:
    """Return known names that resemble ``name``, nearest first, ignoring case."""
    by_key = {each.lower(): each for each in known}
    return [by_key[key] for key in difflib.get_close_matches(name.lower(), by_key, n=count, cutoff=0.5)]
