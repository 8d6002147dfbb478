"""Measurements that others published: a guide's table on a V100, its table by batch size, shares of operator groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainatomy.catalog.files import read_yaml


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A row of the guide's table.

    Attributes:
        train: Settings by the names of ``TrainingArguments``.
        memory_bytes: Memory in use as NVML reported it, rounded down to a MiB by the source.
    """

    name: str
    train: Mapping[str, Any]
    seconds: float
    samples_per_second: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """The guide's runs of one model on one GPU.

    Attributes:
        idle_bytes: Memory in use before the process started.
        context_bytes: Memory in use once the CUDA context existed.
        model_bytes: Memory in use once the model was loaded.
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
    """Share of a group of operators in a layer's floating-point operations and time, in percent."""

    name: str
    flop_percent: float
    time_percent: float


def notebook() -> PublishedTable:
    """Return the guide's nine runs of BERT-large on a V100-16GB in January 2022."""
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
    """Return the guide's table of memory by batch size, without and with fp16: its source and its rows."""
    data = read_yaml("published.yaml")["mixed_precision_by_batch"]
    return data["source"], tuple(MixedPrecisionRow(**row) for row in data["rows"])


def mixed_precision_remark() -> str:
    """Return a remark on the setting of ``mixed_precision_by_batch``: known and unknown."""
    return str(read_yaml("published.yaml")["mixed_precision_by_batch"]["remark"])


def mixed_precision_machine() -> str:
    """Return the machine that ``mixed_precision_by_batch`` was measured on."""
    return str(read_yaml("published.yaml")["mixed_precision_by_batch"]["machine"])


@dataclass(frozen=True, slots=True)
class ParallelRuns:
    """The guide's runs of one model on two GPUs: DataParallel, DDP, DDP through host memory.

    Attributes:
        remark: What is known of their setup.
        machine: What they were measured on, in a few words.
        samples: Samples of each run, on both GPUs.
        seconds: Time of each run.
        notes: What to know of each run where a prediction puts them in another order.
    """

    source: str
    remark: str
    machine: str
    samples: int
    seconds: tuple[float, ...]
    notes: tuple[str, ...]


def parallel_runs() -> ParallelRuns:
    """Return the guide's experiment on two GPUs."""
    data = read_yaml("published.yaml")["parallel"]
    return ParallelRuns(
        data["source"],
        " ".join(data["remark"].split()),
        data["machine"],
        data["samples"],
        tuple(data["seconds"]),
        tuple(" ".join(note.split()) for note in data["notes"]),
    )


def operator_shares() -> tuple[str, tuple[OperatorShare, ...]]:
    """Return the shares of the three operator groups in a BERT-large encoder layer: their source and the groups."""
    data = read_yaml("published.yaml")["operator_shares"]
    return f"{data['source']}: {data['setting']}", tuple(OperatorShare(**group) for group in data["groups"])


def _run(row: Mapping[str, Any]) -> PublishedRun:
    memory = _mib(row["memory_mib"])
    return PublishedRun(
        row["name"], MappingProxyType(dict(row["train"])), row["seconds"], row["samples_per_second"], memory
    )


def _mib(value: int) -> int:
    return value * 2**20
