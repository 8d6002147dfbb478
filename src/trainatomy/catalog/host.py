"""What Python, libraries, workers and CUDA take of a host's memory in each process (``host.yaml``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Self

from trainatomy.catalog.files import read_yaml

_MIB = 1 << 20


class Footprint(NamedTuple):
    """Resident memory of a process in bytes: anonymous, and mapped files."""

    anonymous: int
    mapped: int

    @classmethod
    def of(cls, mebibytes: Iterable[int]) -> Self:
        """Return a pair of the data file."""
        return cls(*(each * _MIB for each in mebibytes))

    def plus(self, other: Footprint) -> Footprint:
        """Return both together."""
        return Footprint(self.anonymous + other.anonymous, self.mapped + other.mapped)


def libraries_footprint(build: Literal["cpu", "cuda"], is_installed: Callable[[str], bool]) -> Footprint:
    """Return what the interpreter and the libraries take that a training with transformers imports.

    Args:
        build: What PyTorch is built for.
        is_installed: Whether a package is, which transformers then imports.
    """
    data = read_yaml("host.yaml")
    parts = [data["interpreter"], data["torch"][build], data["transformers"]]
    parts += [size for package, size in data["packages"].items() if is_installed(package)]
    return Footprint(sum(part[0] for part in parts) * _MIB, sum(part[1] for part in parts) * _MIB)


def footprint(name: Literal["loading", "worker"]) -> Footprint:
    """Return what loading weights or a worker adds."""
    return Footprint.of(read_yaml("host.yaml")[name])


def steps_footprint(place: Literal["cpu", "cuda"]) -> Footprint:
    """Return what the first steps add to a process."""
    return Footprint.of(read_yaml("host.yaml")["steps"][place])


def cuda_footprint() -> tuple[Footprint, Footprint]:
    """Return what a CUDA context and its libraries add to a process, and the most that they may."""
    found = read_yaml("host.yaml")["cuda"]
    return Footprint.of(found["bytes"]), Footprint.of(found["high"])


def sources() -> str:
    """Return where the figures are from."""
    data = read_yaml("host.yaml")
    return f"{data['source'].strip()}; CUDA: {data['cuda']['source']}"
