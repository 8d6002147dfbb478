"""GPUs: their memory, compute and links, with the source of every number.

Each GPU is one file in ``gpus/``, named by its id; ``gpus/index.yaml`` holds the aliases.  MIG instances of a card
(``mig.py``) are GPUs too: ``h200:3g.71gb``.
Units: bytes, bytes per second, floating-point operations per second.

Power of GPUs at their full clocks, as measured by architecture (``power.yaml``).

A GPU as cuDNN describes it: the JSON text that stands for a device in its deviceless API.

Properties of cards that were read on the card itself are in ``cudnn.yaml``. Those of others follow from the
catalog's figures and from what CUDA documents for their compute capability.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from trainatomy.catalog import mig
from trainatomy.catalog.files import close_names, read_yaml
from trainatomy.catalog.instances import is_instance
from trainatomy.errors import WorkloadError


class PowerRates(NamedTuple):
    """Power that a GPU's work takes at full clocks, and its limit; the meaning of each is in ``power.yaml``."""

    limit_watts: float
    idle_watts: float
    joules_per_flop: Mapping[str, float]
    attention: float
    joules_per_byte: float
    kernel_watts: float
    exponent: float


@lru_cache(maxsize=64)
def power_of(gpu: GPU) -> PowerRates | None:
    """Return the power rates of a GPU; None if its limit is not known or no GPU of its architecture was measured."""
    if gpu.power_limit_watts is None:
        return None
    found: Mapping[str, Any]
    for found in read_yaml("power.yaml").values():
        if tuple(found["capability"]) == gpu.cost_capability:
            return PowerRates(
                gpu.power_limit_watts,
                float(found["idle_watts"]),
                {rate: float(joules) for rate, joules in found["joules_per_flop"].items()},
                float(found["attention"]),
                float(found["joules_per_byte_of"].get(gpu.device_name, found["joules_per_byte"])),
                float(found["kernel_watts"]),
                float(found["exponent"]),
            )
    return None


_KILOHERTZ = 1000
_FLOP_PER_LANE = 2
_RECORDED = ((9, 12), (9, 21))
"""The first version of cuDNN whose engines the records name, and the first that has others.

2,475 of the convolutions of the shipped calibrations get the same plans from 9.12, 9.15, 9.19 and 9.20; 10 % get others
from 9.10, and 31 % from 9.21, 9.22 and 9.23.  PyPI's CUDA builds of PyTorch 2.11 to 2.13 bring 9.19 or 9.20, those of
2.14 and 2.15 9.24 and 9.26: of 261 random convolutions that an H200 ran with 9.19, 92 % match with 9.20, 46 % with
these.
"""


def has_recorded_engines(version: str) -> bool:
    """Return whether a version of cuDNN, such as 9.19.0, has the engines that an H200's answers and timings name.

    They are in ``cudnn_plans.json`` and in the points of the calibrations.
    """
    first, end = _RECORDED
    return first <= tuple(map(int, version.split(".")[:2])) < end


def device_text(gpu: GPU) -> str | None:
    """Return the description of a GPU, None for those that cuDNN 9.8 and newer do not run on."""
    catalog = read_yaml("cudnn.yaml")
    limits = catalog["capabilities"].get(".".join(map(str, gpu.capability)))
    if limits is None or gpu.is_amd:
        return None
    measured: dict[str, Any] = catalog["devices"].get(gpu.device_name, {}).get("properties", {})
    return json.dumps({**_assumed(gpu, limits), **measured, **_given(gpu)})


def level_factors(gpu: GPU) -> Mapping[str, float]:
    """Return how much longer than on an H200 a level of partial sums takes (``operators/allocation/cudnn/unnamed.py``).

    "all": where all tiles are shared; the name of a type: where only the last ones are. Empty: as long.
    """
    found: Mapping[str, float] = read_yaml("cudnn.yaml")["devices"].get(gpu.device_name, {}).get("level_factors", {})
    return found


def is_measured(gpu: GPU) -> bool:
    """Return whether the properties were read on a card of this kind."""
    return gpu.device_name in read_yaml("cudnn.yaml")["devices"]


def _given(gpu: GPU) -> dict[str, Any]:
    """Return the properties that the catalog, or the user's changes of it, hold."""
    major, minor = gpu.capability
    return {
        "multiProcessorCount": gpu.multiprocessors,
        "totalGlobalMem": gpu.memory_bytes,
        "deviceVer": 100 * major + 10 * minor,
        "deviceName": gpu.device_name,
        **({"l2CacheSize": gpu.l2_bytes} if gpu.l2_bytes else {}),
    }


def _assumed(gpu: GPU, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the properties that follow from the compute capability, and clocks from rate and bandwidth."""
    lanes = gpu.multiprocessors * limits["fp32_lanes"] * _FLOP_PER_LANE
    clock = gpu.rates.get("fp32", 0.0) / lanes / _KILOHERTZ
    return {**limits["properties"], "l2CacheSize": 0, "smClockRateKHz": round(clock)}


EXAMPLE = "gpu: {base: rtx-4090, memory_bytes: 24 GiB, multiprocessors: 114, bandwidth_bytes_per_second: 1.008e12}"
"""A GPU that does not ship as data, described in a workload's file."""

_EMPTY: Mapping[str, Any] = MappingProxyType({})


_AMD_COSTS_AS = (8, 6)
"""For costs, an AMD GPU is one of 128 lanes in a compute unit whose matrix cores have no asynchronous instructions."""
_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024} | dict.fromkeys(((8, 6), (8, 7), (8, 9), (11, 0), (12, 0), (12, 1)), 1536)
"""CUDA C++ Programming Guide, "Technical specifications per compute capability"; 2048 for the others."""


@dataclass(frozen=True, slots=True)
class Context:
    """Memory that a process holds outside PyTorch's allocator: the CUDA context and the libraries that it loads.

    Attributes:
        first_tensor_bytes: Held once the first tensor exists.
        loads_bytes: Added by the first use of each library.  ``kernels``: PyTorch's own kernels; ``cublas`` and
            ``cublas_backward``: cuBLAS' handle of the forward thread and of autograd's; ``cudnn`` and
            ``cudnn_backward``: cuDNN's attention or convolution; ``convolution``: added by a convolution to that;
            ``training``: kernels of backward and optimizer; ``streams``: PyTorch's pools of streams, which the first
            ``torch.cuda.Stream()`` makes (c10/cuda/CUDAStream.cpp: 32 streams of each of 4 priorities); ``cusolver``:
            factorisations of ``torch.linalg``.
    """

    era: str
    first_tensor_bytes: int
    loads_bytes: Mapping[str, int]
    environment: str

    def holding(self, libraries: Iterable[str]) -> int:
        """Return the bytes held once ``libraries`` (keys of ``loads_bytes``; others cost nothing) have been used."""
        return self.first_tensor_bytes + sum(self.loads_bytes.get(name, 0) for name in set(libraries))


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU.

    Attributes:
        memory_bytes: Memory that CUDA offers to processes (``total_memory`` of torch's device properties).
        nvidia_smi_bytes: Total that nvidia-smi shows; the driver keeps the difference for itself.
        driver_reserved_bytes: Memory that the driver keeps, where it was measured.
        power_limit_watts: Power that the driver allows by default; None: not known.
        rates: Dense peaks in FLOP/s by precision (fp64 and fp32 without tensor cores; tf32, fp16, bf16, fp8 with
            them); a missing one is not offered.
        links: Bytes per second each way over all links of a kind together (pcie, nvlink).
        link: The link between the GPUs of a machine, by its name in ``links.yaml``.
        unified_memory: Whether the memory is also the host's.
        architecture: Instruction set of an AMD GPU, such as ``gfx942``; empty: an NVIDIA GPU.
        slice_of: Id of the card that this is a MIG instance of; empty for a whole card.
        sources: Source of each field by its dotted name; an entry holds for all fields below it.
        assumed: Reason for each assumed value, keyed in the same way.
    """

    id: str
    name: str
    device_name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    nvidia_smi_bytes: int | None = None
    driver_reserved_bytes: int | None = None
    bandwidth_bytes_per_second: float = 0.0
    rates: Mapping[str, float] = field(default_factory=lambda: _EMPTY, hash=False)
    l2_bytes: int | None = None
    power_limit_watts: float | None = None
    links: Mapping[str, float] = field(default_factory=lambda: _EMPTY, hash=False)
    link: str = ""
    unified_memory: bool = False
    architecture: str = ""
    slice_of: str = ""
    contexts: Mapping[str, Context] = field(default_factory=lambda: _EMPTY, hash=False)
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=lambda: _EMPTY, hash=False, repr=False)
    assumed: Mapping[str, str] = field(default_factory=lambda: _EMPTY, hash=False, repr=False)

    @property
    def card(self) -> str:
        """Return the id of the whole card."""
        return self.slice_of or self.id

    @property
    def is_amd(self) -> bool:
        """Return whether PyTorch runs on it through HIP."""
        return bool(self.architecture)

    @property
    def cost_capability(self) -> tuple[int, int]:
        """Return the compute capability whose forms of kernel costs hold for the GPU, at its own data sheet's rates."""
        return _AMD_COSTS_AS if self.is_amd else self.capability

    def context(self, era: str = "lazy") -> Context:
        """Return the context under the software of an era: ``lazy`` (today's) or ``eager-cuda-11``."""
        try:
            return self.contexts[era]
        except KeyError:
            known = ", ".join(self.contexts) or "none"
            raise WorkloadError(f"no context of {self.id} is known for {era!r}; known: {known}") from None

    def source(self, name: str) -> str:
        """Return the source of a field by its own or its nearest parent's entry, ``assumed: …`` or ``unknown``."""
        while name:
            if name in self.assumed:
                return f"assumed: {self.assumed[name]}"
            if name in self.sources:
                return self.sources[name]
            name = name.rpartition(".")[0]
        return "unknown"


class HasThreads(Protocol):
    """A GPU, or what a kernel's choices depend on of one."""

    @property
    def capability(self) -> tuple[int, int]: ...
    @property
    def architecture(self) -> str: ...


def threads_per_multiprocessor(gpu: HasThreads) -> int:
    """Return the threads that a multiprocessor holds at once: on AMD's GPUs 2048 (``hipGetDeviceProperties``)."""
    return 2048 if gpu.architecture else _THREADS_PER_MULTIPROCESSOR.get(gpu.capability, 2048)


_OTHERS = "only NVIDIA's GPUs and AMD's are simulated"
_SEVERAL = "name one; `trainatomy compare` and `trainatomy fit` take several"
_NO_NAMES = (
    (re.compile(","), _SEVERAL),
    (
        re.compile(r"^\d+(\.\d+)?\s*[gG]i?[bB]?$"),
        "that is a memory size: name a GPU too, and give the size as --gpu-memory-bytes (gpu: {memory_bytes: …});",
    ),
    (
        re.compile(r"^(intel|apple|gaudi|arc|m[1-9]\b|mps|tpu|cpu)", re.IGNORECASE),
        _OTHERS,
    ),
)
"""Forms that are no GPU's name, and what to say to them."""


def find_gpu(name: str) -> GPU:
    """Return the GPU with that id or alias, ignoring case and what separates words and numbers (``RTX4090``).

    A colon and the name of a profile (``h200:3g.71gb``) make it a MIG instance of that card.

    Raises:
        WorkloadError: No GPU has that name; the message suggests the nearest ones.
    """
    if instance := mig.NAME.fullmatch(name.strip()):
        return mig.instance_of(find_gpu(instance[1]), instance[2].strip().lower())
    gpu_id = _ids_by_name().get(_normal(name)) or _ids_of_joined_names().get(_joined(name))
    if gpu_id is None:
        sizes = [known for known in _ids_by_name() if known.startswith(f"{_normal(name)}-")]  # rtx-4060-ti-16gb
        near = sizes or close_names(_normal(name), _ids_by_name())
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(_index())}"
        if is_instance(name):
            hint = f"that is a machine: --instance {name}"
        for pattern, meant in _NO_NAMES:
            hint = meant if pattern.search(name.strip()) else hint
        if hint in (_OTHERS, _SEVERAL):
            raise WorkloadError(f"unknown GPU {name!r}; {hint} (`trainatomy gpus` lists them)", key="gpu")
        raise WorkloadError(
            f"unknown GPU {name!r}; {hint} (`trainatomy gpus` lists all). To describe your own, start from the nearest "
            f"one in the workload's file: {EXAMPLE}",
            key="gpu",
        )
    return _load(gpu_id)


def gpus() -> tuple[GPU, ...]:
    """Return all GPUs that ship as data, oldest first; MIG instances are not among them."""
    return tuple(_load(gpu_id) for gpu_id in _index())


def gpu_of_driver(name: str) -> GPU | None:
    """Return the GPU, or the MIG instance of one, that the driver names so; None if there are no data for it."""
    try:
        found = find_gpu(name)
    except WorkloadError:
        return None
    return found if found.device_name == name else None


def gpu_from_mapping(mapping: Mapping[str, Any], base: str | GPU | None = None) -> GPU:
    """Make a GPU from keys as in the files of ``gpus/``; the rest comes from ``base`` (default: the H200).

    Every key of ``mapping`` counts as assumed, "given by the user".  With ``memory_bytes`` of its own, the GPU
    drops the base's ``nvidia_smi_bytes`` and ``driver_reserved_bytes``.

    Raises:
        WorkloadError: A key is unknown, or a value is not of the key's kind.
    """
    origin = base if isinstance(base, GPU) else find_gpu(base or "h200")
    unknown = [key for key in mapping if key not in _KEYS]
    if unknown:
        near = close_names(unknown[0], _KEYS, 1) or list(_KEYS)
        raise WorkloadError(f"a GPU has no key {unknown[0]!r}; did you mean {' or '.join(near)}?")
    changes: dict[str, Any] = {}
    for key, value in mapping.items():
        try:
            changes[_field(key)] = _KEYS[key](value)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise WorkloadError(f"gpu: {key}: {value!r} is not a valid value ({error})") from None
    if "memory_bytes" in changes:
        changes.setdefault("nvidia_smi_bytes", None)
        changes.setdefault("driver_reserved_bytes", None)
    for key in ("rates", "links", "contexts"):
        if key in changes:
            changes[key] = MappingProxyType({**getattr(origin, key), **changes[key]})
    name = changes.setdefault("name", f"{origin.name}, altered")
    changes.setdefault("id", _normal(name))
    names = [_field(key) + part for key, value in mapping.items() for part in _parts(value)]
    assumed = {**origin.assumed, **dict.fromkeys(names, "given by the user")}
    return replace(origin, aliases=(), assumed=MappingProxyType(assumed), **changes)


def _parts(value: Any) -> list[str]:
    return [f".{part}" for part in value] if isinstance(value, Mapping) else [""]


def _normal(name: str) -> str:
    words = re.sub(r"[\s_]+", "-", name.strip().lower())
    return re.sub(r"^((nvidia|amd)-)?((geforce|tesla|radeon|instinct)-)?", "", words)


def _joined(name: str) -> str:
    """Return a name without what separates its words, and without words that tell nothing apart: ``a10080gb``."""
    words = re.sub(r"[^a-z0-9]+", "", _normal(name))
    return re.sub(r"(?<=\d)g$", "gb", re.sub(r"(gpu|generation)$", "", words))


def _index() -> Mapping[str, list[Any]]:
    index: Mapping[str, list[Any]] = read_yaml("gpus", "index.yaml")
    return index


@lru_cache(maxsize=1)
def _ids_by_name() -> Mapping[str, str]:
    return {str(name): gpu_id for gpu_id, aliases in _index().items() for name in (gpu_id, *aliases)}


@lru_cache(maxsize=1)
def _ids_of_joined_names() -> Mapping[str, str]:
    return {_joined(name): gpu_id for name, gpu_id in _ids_by_name().items()}


@cache
def _load(gpu_id: str) -> GPU:
    data = dict(read_yaml("gpus", f"{gpu_id}.yaml"))
    sources = {_field(name): entry["source"].strip() for entry in data.pop("sources") for name in entry["gives"]}
    assumed = {_field(name): why.strip() for name, why in data.pop("assumed").items()}
    fields: dict[str, Any] = {_field(key): _KEYS[key](value) for key, value in data.items()}
    fields |= {"sources": MappingProxyType(sources), "assumed": MappingProxyType(assumed)}
    return GPU(id=gpu_id, aliases=tuple(str(alias) for alias in _index()[gpu_id]), **fields)


def _field(dotted: str) -> str:
    head, dot, tail = dotted.partition(".")
    return _FIELDS.get(head, head) + dot + tail


def _capability(value: Iterable[Any]) -> tuple[int, int]:
    major, minor = str(value).split(".") if isinstance(value, str | float) else value
    return int(major), int(minor)


def _numbers(value: Mapping[str, Any]) -> Mapping[str, float]:
    return MappingProxyType({str(key): float(number) for key, number in value.items()})


def _contexts(value: Mapping[str, Any]) -> Mapping[str, Context]:
    def one(era: str, entry: Mapping[str, Any]) -> Context:
        loads = {str(library): int(size) for library, size in entry["loads_bytes"].items()}
        return Context(
            era, int(entry["first_tensor_bytes"]), MappingProxyType(loads), str(entry.get("environment", ""))
        )

    return MappingProxyType({era: one(era, entry) for era, entry in value.items()})


# Keys of a GPU's file with the function that reads each value, and the fields of GPU whose name differs from the key.
_KEYS: dict[str, Callable[[Any], Any]] = {
    "name": str,
    "device_name": str,
    "capability": _capability,
    "multiprocessors": int,
    "memory_bytes": int,
    "nvidia_smi_bytes": int,
    "driver_reserved_bytes": int,
    "bandwidth_bytes_per_second": float,
    "rates_flop_per_second": _numbers,
    "l2_bytes": int,
    "power_limit_watts": float,
    "link_bytes_per_second": _numbers,
    "link": str,
    "unified_memory": bool,
    "architecture": str,
    "context": _contexts,
}
_FIELDS = {"rates_flop_per_second": "rates", "link_bytes_per_second": "links", "context": "contexts"}
