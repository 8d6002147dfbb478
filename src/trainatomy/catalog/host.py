"""What Python, libraries, workers and CUDA take of a host's memory in each process (``host.yaml``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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


def imported_footprint(modules: Collection[str], measured: Mapping[str, Footprint]) -> Footprint:
    """Return what the interpreter and the libraries take that a process on a GPU has imported.

    Args:
        modules: Names of the modules.
        measured: What importing other packages than those of the data file added.
    """
    data = read_yaml("host.yaml")
    known = {_MODULES.get(name, name): Footprint.of(size) for name, size in data["packages"].items()}
    found = [Footprint.of(data["interpreter"]), Footprint.of(data["torch"]["cuda"])]
    found.append(Footprint.of(data["transformers" if "transformers" in modules else "compiler"]))
    found += [size for name, size in known.items() if name in modules]
    found += [size for name, size in measured.items() if name not in known and name not in _IN_OTHERS]
    return Footprint(sum(each.anonymous for each in found), sum(each.mapped for each in found))


_MODULES = {"scikit-learn": "sklearn", "trl": "peft"}
"""What is imported of packages of the data file, where it has another name: most that trl takes is peft's."""
_IN_OTHERS = frozenset(
    "torch transformers accelerate numpy tokenizers safetensors huggingface_hub regex peft scipy pandas sympy networkx "
    "mpmath trainatomy".split()
)
"""Packages whose memory is in another entry of the data file, and this one, which a training does not import."""


def launcher_footprint() -> Footprint:
    """Return what the process of ``torchrun`` takes, which starts those of a training: it imports PyTorch."""
    data = read_yaml("host.yaml")
    return Footprint.of(data["interpreter"]).plus(Footprint.of(data["torch"]["cuda"]))


def footprint(name: Literal["loading", "worker", "nccl"]) -> Footprint:
    """Return what loading weights, a worker or NCCL adds."""
    return Footprint.of(read_yaml("host.yaml")[name])


def steps_footprint(place: Literal["cpu", "cuda"]) -> Footprint:
    """Return what the first steps add to a process."""
    return Footprint.of(read_yaml("host.yaml")["steps"][place])


class CudaFootprint(NamedTuple):
    """What CUDA adds to a process: its context, all of it from the first step on, and the most that this may be."""

    context: Footprint
    steps: Footprint
    most: Footprint

    @classmethod
    def known(cls) -> CudaFootprint:
        """Return what was measured."""
        found = read_yaml("host.yaml")["cuda"]
        return cls(*(Footprint.of(found[name]) for name in ("context", "steps", "most")))


def sources() -> str:
    """Return where the figures are from."""
    data = read_yaml("host.yaml")
    return f"{data['source'].strip()}; CUDA: {data['cuda']['source']}"
