"""Hosts whose costs of issuing operations are known (``hosts.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from trainatomy.facts.data import read_yaml


@dataclass(frozen=True, slots=True)
class Host:
    """A host: its id and name, microseconds by the names of ``clock.issue.HostCosts``, and where they come from."""

    id: str
    name: str
    microseconds: dict[str, Any]
    source: str


@cache
def hosts() -> dict[str, Host]:
    """All hosts by id."""
    found = read_yaml("hosts.yaml")["hosts"]
    return {key: Host(key, one["name"], one["microseconds"], one["source"].strip()) for key, one in found.items()}


def reference_host() -> Host:
    """The host that others are compared with, and that is assumed where none is named."""
    return hosts()[read_yaml("hosts.yaml")["reference"]]
