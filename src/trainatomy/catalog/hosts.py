"""Hosts whose costs of issuing operations are known (``hosts.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from trainatomy.catalog.files import read_yaml


@dataclass(frozen=True, slots=True)
class Host:
    """A host: its id and name, microseconds by the names of ``clock.issue.HostCosts``, and where they come from.

    ``occasions``: how many times as long it took on each occasion on which it was timed; machines are shared, and other
    work on them takes its part.
    """

    id: str
    name: str
    microseconds: dict[str, Any]
    occasions: tuple[float, ...]
    source: str

    @property
    def quiet(self) -> float:
        """The least of the occasions: other work slows a host and never quickens it, and no prediction knows of any."""
        return min(self.occasions)


@cache
def hosts() -> dict[str, Host]:
    """All hosts by id."""
    found = read_yaml("hosts.yaml")["hosts"]
    return {key: _host(key, one) for key, one in found.items()}


def _host(key: str, one: dict[str, Any]) -> Host:
    occasions = tuple(float(occasion["factor"]) for occasion in one["occasions"])
    return Host(key, one["name"], one["microseconds"], occasions, one["source"].strip())


def reference_host() -> Host:
    """The host that others are compared with, and that is assumed where none is named."""
    return hosts()[read_yaml("hosts.yaml")["reference"]]
