"""The values of kernel costs: the GPU as far as a cost depends on it, and the work of a call before it is timed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.links import Links
from trainatomy.operators.cost.plans import Plan
from trainatomy.operators.traffic import traffic
from trainatomy.results.operations import Array, Call

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU

HALVES = frozenset({"float16", "bfloat16"})
FP32_CORES = {(3, 7): 192, (6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
"""fp32 cores per multiprocessor by compute capability (CUDA C++ Programming Guide); 128 on all others."""
_ASYNCHRONOUS_TENSOR_CORES = (9, 10)
"""Major compute capabilities whose tensor cores reach their peak by asynchronous instructions only."""
Passes = tuple[tuple[str, float], ...]

_GEOMETRY = (("stride", 1), ("padding", 0), ("dilation", 1))
"""Arguments that place a filter over an image, with the values they have where a call does not name them."""


class Chip(NamedTuple):
    """A GPU as far as the cost of a kernel depends on it.

    Attributes:
        rates: peak FLOP per second by precision.
        bandwidth: bytes per second of the data sheet.
        tf32: fp32 matrix products may use tensor cores.
        cudnn_tf32: fp32 convolutions may (PyTorch's default).
        bus: bytes per second each way between host memory and the GPU.
        links: links to other GPUs of the training; None: it runs on one.
        host_pace: how many times as long as on a quiet host the CPU takes to launch kernels, for libraries whose
            kernels run beside each other where it is quick enough.
    """

    capability: tuple[int, int]
    multiprocessors: int
    bandwidth: float
    l2_bytes: int
    rates: Mapping[str, float]
    tf32: bool = False
    cudnn_tf32: bool = True
    bus: float = 31.5e9
    links: Links | None = None
    host_pace: float = 1.0

    def rate(self, precision: str) -> float:
        """Return the peak of a precision, or that of fp32 where the GPU lacks it (bf16 before Ampere)."""
        return self.rates.get(precision, self.rates["fp32"])

    @property
    def half_of_16_bits(self) -> float:
        """Half the peak of tensor cores in 16 bits, which is that of TF32 where they know it (not before Ampere)."""
        return self.rate("fp16") / 2 if self.has_tensor_cores and "tf32" not in self.rates else self.rate("tf32")

    @property
    def issue_rate(self) -> float:
        """Multiprocessors times clock in Hz; the clock follows from the fp32 peak, two operations a core."""
        return self.rates["fp32"] / (2 * FP32_CORES.get(self.capability, 128))

    @property
    def has_tensor_cores(self) -> bool:
        """Whether matrix arithmetic of 16 bits runs on tensor cores."""
        return self.capability >= (7, 0)

    @property
    def is_asynchronous(self) -> bool:
        """Whether tensor cores have asynchronous instructions; consumer GPUs after Ada lack them."""
        return self.capability[0] in _ASYNCHRONOUS_TENSOR_CORES

    @property
    def older_instructions(self) -> float:
        """Share of their peak that tensor cores reach by the instructions which older GPUs have too.

        It is 1 where these reach the peak.
        """
        known: float = read_yaml("efficiency.yaml")["hopper"]["older_instructions"]
        return known if self.is_asynchronous else 1.0

    def precision(self, dtype: str, tf32: bool | None = None) -> str:
        """Return the key of ``rates`` for matrix arithmetic on numbers of a type."""
        if dtype in ("float16", "bfloat16"):
            return "fp16" if dtype == "float16" else "bf16"
        if dtype == "float32" and (self.tf32 if tf32 is None else tf32) and "tf32" in self.rates:
            return "tf32"
        return "fp64" if dtype == "float64" else "fp8" if dtype.startswith("float8") else "fp32"


def chip_of(gpu: GPU, tf32: bool | None) -> Chip:
    """Return the data-sheet figures of a GPU that the cost of a kernel depends on; ``tf32`` as in ``cost_model_of``."""
    return Chip(
        gpu.cost_capability,
        gpu.multiprocessors,
        gpu.bandwidth_bytes_per_second,
        gpu.l2_bytes or 4 * 2**20,
        gpu.rates,
        tf32=bool(tf32),
        cudnn_tf32=tf32 is not False,
        bus=gpu.links.get("nvlink_c2c") or gpu.links.get("pcie", 31.5e9),
    )


class KernelWork(NamedTuple):
    """The work of a call's kernels.

    Attributes:
        family: dotted name from the general to the special, by which a measured efficiency is looked up.
        features: logarithms to base 2 that say how alike two calls of a family are.
        flop: floating-point operations.
        rate: the key of ``Chip.rates`` that bounds them.
        bytes: bytes that the kernels move: the compulsory traffic of the call (``operators.traffic``) and ``passes``.
        launches: kernels, copies and fills.
        seconds: time of kernels of this form by physics alone, longer than ``flop`` at the peak ``rate`` or ``bytes``
            at the GPU's bandwidth; 0 where these two and the kernels' floor say it all.
        passes: what ``bytes`` has beyond the compulsory traffic, by name; negative where a kernel's cost leaves
            something out.
        at_once: kernels that run at a time on average, where a library spreads them over streams of its own.
        beside: time of kernels of another kind before or after them, to which the efficiency of the family does not
            apply.
        instructions: what fused attention computes, in whole blocks and as if no multiprocessor were idle: FLOP and the
            key of ``Chip.rates`` of the cores that execute it.
        plans: by which plans cuDNN computes a convolution, where its library says so.
        own_products: ``seconds`` follows from constants of the GPU's own architecture (``catalog/products.yaml``), to
            which the efficiencies of another one do not apply.
    """

    family: str
    features: tuple[float, ...] = ()
    flop: float = 0.0
    rate: str = "fp32"
    bytes: float = 0.0
    launches: int = 1
    seconds: float = 0.0
    passes: Passes = ()
    at_once: float = 1.0
    beside: float = 0.0
    instructions: tuple[float, str] | None = None
    plans: tuple[Plan, ...] = ()
    own_products: bool = False


class Constants:
    """The numbers of a section of ``catalog/efficiency.yaml``, by their names."""

    def __init__(self, section: Mapping[str, float]) -> None:
        vars(self).update(section)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> float: ...


@cache
def constants(*path: str) -> Constants:
    """Return the section of ``catalog/efficiency.yaml`` at a path."""
    section = read_yaml("efficiency.yaml")
    for name in path:
        section = section[name]
    return Constants(section)


NOTHING = KernelWork("nothing", launches=0)
"""The work of a call for which no kernel runs."""


class Efficiency(NamedTuple):
    """The efficiency of a family of kernels without calibration (``catalog/efficiency.yaml``).

    Attributes:
        kernel_seconds: duration of a call that has next to nothing to do.
        share: share of the bandwidth that it reaches, or of the peak where arithmetic bounds it.
    """

    kernel_seconds: float
    share: float


@cache
def efficiency_of(family: str) -> Efficiency:
    """Return the efficiency of a family, or of the nearest one that contains it."""
    known = read_yaml("efficiency.yaml")["families"]
    while family not in known:
        if not family:
            raise KeyError("efficiency.yaml: families has no entry for everything")
        family = family.rpartition(".")[0]
    kernel_us, share = known[family]
    return Efficiency(kernel_us * 1e-6, share)


def physical_seconds(work: KernelWork, chip: Chip) -> float:
    """Return the physical estimate of the family's own kernels: a formula, or a minimum per kernel plus traffic."""
    if work.seconds:
        return work.seconds
    reach = efficiency_of(work.family)
    return reach.kernel_seconds * max(work.launches / 2, 1) + work.bytes / (chip.bandwidth * reach.share)


def passes_to(call: Call, moved: float, name: str) -> Passes:
    """Return the difference between ``moved`` bytes and the compulsory traffic as one pass of that name."""
    difference = moved - traffic(call).bytes
    return ((name, difference),) if difference else ()


def on_gpu(tensors: tuple[Array, ...]) -> list[Array]:
    """Return the tensors that lie in GPU memory."""
    return [tensor for tensor in tensors if not tensor.on_host]


def moving_seconds(moved: float, from_memory: float, share: float, chip: Chip) -> float:
    """Return the time of moving bytes at a share of the bandwidth, part of which the cache holds.

    On the GPU that was measured it is that share.  What the time exceeds that of memory is the multiprocessors' own and
    does not change with the bandwidth of another GPU.

    Args:
        moved: Bytes of all passes.
        from_memory: Those that are read and written at least once.
        share: The share of an H200's bandwidth that all passes reach.
        chip: The GPU.
    """
    facts = read_yaml("efficiency.yaml")
    top, measured = facts["traffic"]["bandwidth"], facts["loading"]["bandwidth"]
    return float(moved / (measured * share) + from_memory / top * (1 / chip.bandwidth - 1 / measured))


def largest(tensors: tuple[Array, ...]) -> Array | None:
    """Return the tensor in GPU memory with the most elements."""
    return max(on_gpu(tensors), key=lambda tensor: tensor.elements, default=None)


def name_of(call: Call) -> str:
    """Return the operator without its namespace."""
    return call.name.rpartition("::")[2]


def number(call: Call, name: str, default: str = "") -> str:
    """Return an argument that is no tensor, as text."""
    for key, value in call.numbers:
        if key == name:
            return value
    return default


@cache
def whole_numbers(text: str) -> tuple[int, ...]:
    """Return the integers of a text such as ``[1, 2]``."""
    parts = text.strip("[]() ").replace(" ", "").split(",")
    return tuple(int(part) for part in parts if part.lstrip("-").isdigit())


def geometry_of(call: Call, space: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return stride, padding and dilation of a convolution in each dimension of space; one number holds for all."""
    given = (whole_numbers(number(call, name)) or (usual,) for name, usual in _GEOMETRY)
    stride, padding, dilation = (one * space if len(one) == 1 else one for one in given)
    return stride, padding, dilation


def wanted_gradients(call: Call) -> list[bool]:
    """Return which of input, weight and bias of a convolution get a gradient."""
    text = number(call, "output_mask", "[True, True, True]")
    return [part.strip(" []") == "True" for part in text.split(",")]
