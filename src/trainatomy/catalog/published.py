"""Measurements that others published: a guide's table on a V100, its table by batch size, shares of operator groups."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row of the guide's table.

    ``train``: settings by the names of TrainingArguments.  ``memory_bytes``: what NVML reported as used, which the
    source rounds down to a MiB.
    """

    name: str
    train: Mapping[str, Any]
    seconds: float
    samples_per_second: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """The guide's runs of one model on one card.

    Before training the card held ``idle_bytes``, then ``context_bytes`` in all, then ``model_bytes`` in all.
    """

    source: str
    gpu: str
    model: str
    class_name: str
    sequence_length: int
    samples: int
    software: Mapping[str, str]
    assumed_software: tuple[str, ...]
    idle_bytes: int
    context_bytes: int
    model_bytes: int
    rows: tuple[PublishedRun, ...]


@dataclass(frozen=True, slots=True)
class MixedPrecisionRow:
    """Memory at a batch size without and with fp16, in the source's MB."""

    batch_size: int
    fp32_mb: int
    fp16_mb: int


@dataclass(frozen=True, slots=True)
class OperatorShare:
    """Share of a group of operators in the floating-point operations and in the time of a layer, in percent."""

    name: str
    flop_percent: float
    time_percent: float


def notebook() -> PublishedTable:
    """The guide's nine runs of BERT-large on a V100-16GB in January 2022."""
    data = read_yaml("published.yaml")["notebook"]
    software = {key: str(value) for key, value in data["software"].items() if key != "assumed"}
    return PublishedTable(
        source=data["source"],
        gpu=data["gpu"],
        model=data["model"],
        class_name=data["class"],
        sequence_length=data["sequence_length"],
        samples=data["samples"],
        software=MappingProxyType(software),
        assumed_software=tuple(data["software"]["assumed"]),
        idle_bytes=_mib(data["idle_mib"]),
        context_bytes=_mib(data["context_mib"]),
        model_bytes=_mib(data["model_mib"]),
        rows=tuple(_run(row) for row in data["rows"]),
    )


def mixed_precision_by_batch() -> tuple[str, tuple[MixedPrecisionRow, ...]]:
    """The guide's table of memory by batch size, without and with fp16: its source and its rows."""
    data = read_yaml("published.yaml")["mixed_precision_by_batch"]
    return data["source"], tuple(MixedPrecisionRow(**row) for row in data["rows"])


def mixed_precision_remark() -> str:
    """What is known, and what is not, of the setting of ``mixed_precision_by_batch``."""
    return str(read_yaml("published.yaml")["mixed_precision_by_batch"]["remark"])


def mixed_precision_machine() -> str:
    """What ``mixed_precision_by_batch`` was measured on."""
    return str(read_yaml("published.yaml")["mixed_precision_by_batch"]["machine"])


def operator_shares() -> tuple[str, tuple[OperatorShare, ...]]:
    """Shares of the three groups of operators in a BERT-large encoder layer: their source and the groups."""
    data = read_yaml("published.yaml")["operator_shares"]
    return f"{data['source']}: {data['setting']}", tuple(OperatorShare(**group) for group in data["groups"])


def _run(row: Mapping[str, Any]) -> PublishedRun:
    memory = _mib(row["memory_mib"])
    return PublishedRun(
        row["name"], MappingProxyType(dict(row["train"])), row["seconds"], row["samples_per_second"], memory
    )


def _mib(value: int) -> int:
    return value * 2**20
