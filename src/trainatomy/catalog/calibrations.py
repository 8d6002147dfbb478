"""Calibrations: measurements that ``trainatomy calibrate`` made on a machine.  Some ship, in ``calibrations/``.

A calibration is a file, or a folder with points in files by kind of kernel and the rest in ``calibration.json``.

Text form of an operator call, which calibration files use to name the timed calls.

Example: ``aten::mm(bf16[512,1024],bf16[1024,4096|1,1024])->bf16[512,4096];k=v``.

- A tensor is its type's short name and its sizes; strides follow after a bar where it is not contiguous.
- ``@2``: shares memory with the tensor at position 2 of the line.  ``*3``: three equal tensors, each with own memory.
- ``h`` in front: lies in host memory.  ``!`` behind: is written to.
- ``#`` precedes the lengths of list arguments.  The FLOP count is not kept.
- Arguments of convolutions are left out where they are the usual ones (stride 1, no padding, one group, ...).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import WorkloadError
from trainatomy.results.operations import Array, Call

SHORT = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "b8", "float8_e4m3fn": "f8e4", "float8_e5m2": "f8e5",
    "complex64": "c64",
}  # fmt: skip
LONG = {short: long for long, short in SHORT.items()}
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "c64": 8}

_USUAL = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "output_padding": 0, "groups": 1}
"""Arguments of a convolution with their usual values; lists have the value in each dimension."""
_ARGUMENTS = {
    "aten::convolution": tuple(_USUAL),
    "aten::convolution_backward": ("bias_sizes", *_USUAL, "output_mask"),
}
"""Arguments of convolutions in the order of their schemas."""

_IN_HOST_MEMORY = re.compile(r"[(,>]h\w+\[")
_ARRAY = re.compile(r"(h?)(\w+)\[([\d,]*)(?:\|([\d,]*))?\](?:@(\d+))?(?:\*(\d+))?(!?)")


@cache
def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of that shape."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def array(dtype: str, *shape: int, strides: tuple[int, ...] | None = None, storage: int = -1) -> Array:
    """Make a tensor from the short or long name of its type; contiguous unless ``strides`` (in elements) are given."""
    short = SHORT.get(dtype, dtype)
    return Array(
        shape, contiguous(shape) if strides is None else strides, LONG.get(short, dtype), BYTES.get(short, 1), storage
    )


def to_text(call: Call) -> str:
    """Return the line for ``call``."""
    first: dict[int, int] = {}
    words = []
    for position, tensor in enumerate((*call.inputs, *call.outputs)):
        shared = first.setdefault(tensor.storage, position)
        words.append(_word(tensor, shared if shared != position else None, position in call.written))
    count = len(call.inputs)
    text = f"{call.name}({_joined(words[:count])})->{_joined(words[count:])}"
    if call.lengths:
        text += "#" + ",".join(map(str, call.lengths))
    usual = _usual_numbers(call.name, call.inputs)
    return text + "".join(f";{key}={value}" for key, value in call.numbers if usual.get(key) != value)


def _usual_numbers(name: str, inputs: Sequence[Array]) -> dict[str, str]:
    """Return the usual arguments of a convolution of these inputs, as texts; nothing for other operators."""
    if name not in _ARGUMENTS or not inputs:
        return {}
    dimensions = len(inputs[0].shape) - 2
    single = ("transposed", "groups")
    return {key: str(value if key in single else [value] * dimensions) for key, value in _USUAL.items()}


def _with_usual_numbers(name: str, inputs: Sequence[Array], given: dict[str, str]) -> dict[str, str]:
    """Return the arguments of a call, and the usual ones that a line leaves out, in the order of the schema."""
    every = _usual_numbers(name, inputs) | given
    return {key: every.pop(key) for key in _ARGUMENTS.get(name, ()) if key in every} | every


def _word(tensor: Array, shared: int | None, written: bool) -> str:
    sizes = ",".join(map(str, tensor.shape))
    if tensor.strides != contiguous(tensor.shape):
        sizes += "|" + ",".join(map(str, tensor.strides))
    own = "" if shared is None else f"@{shared}"
    host = "h" if tensor.on_host else ""
    return f"{host}{SHORT.get(tensor.dtype, tensor.dtype)}[{sizes}]{own}{'!' if written else ''}"


def _joined(words: list[str]) -> str:
    """Join words; equal neighbours are written once, with their count before the ``!``."""
    parts = []
    for word, run in groupby(words):
        count = len(list(run))
        mark = "!" if word.endswith("!") else ""
        parts.append(f"{word.removesuffix('!')}{f'*{count}' if count > 1 else ''}{mark}")
    return ",".join(parts)


def has_host_memory(text: str) -> bool:
    """Return whether a tensor of a line of ``to_text`` lies in host memory, without parsing the line."""
    return _IN_HOST_MEMORY.search(text) is not None


@cache
def from_text(text: str) -> Call:
    """Parse a line of ``to_text``; raises ``ValueError`` for any other text."""
    head, *pairs = text.split(";")
    matched = re.fullmatch(r"([\w:.]+)\((.*)\)->([^#]*)(?:#([\d,]*))?", head)
    if matched is None:
        raise ValueError(f"not a call: {text!r}")
    name, before, after, lengths = matched.groups()
    inputs, written = _arrays(before, [])
    outputs, _ = _arrays(after, inputs)
    given = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
    numbers = tuple(_with_usual_numbers(name, inputs, given).items())
    sizes = tuple(int(size) for size in lengths.split(",")) if lengths else ()
    return Call(name, tuple(inputs), tuple(outputs), sizes, numbers, None, tuple(written))


def _arrays(text: str, before: list[Array]) -> tuple[list[Array], list[int]]:
    found: list[Array] = []
    written: list[int] = []
    for host, dtype, sizes, strides, shared, count, mark in _ARRAY.findall(text):
        shape = _numbers(sizes)
        steps = _numbers(strides) if strides else contiguous(shape)
        storage = (before + found)[int(shared)].storage if shared else -1
        name, size, on_host = LONG.get(dtype, dtype), BYTES.get(dtype, 1), bool(host)
        for position in range(len(before) + len(found), len(before) + len(found) + int(count or 1)):
            if mark:
                written.append(position)
            found.append(Array(shape, steps, name, size, storage if shared else position, on_host))
    return found, written


@cache
def _numbers(text: str) -> tuple[int, ...]:
    return tuple([int(part) for part in text.split(",") if part])


SCHEMA = "trainatomy/calibration/1"
WHOLE = "calibration.json"
"""The file of a calibration's folder that has all but the points of kernels."""


class Point(NamedTuple):
    """An operator call that was timed.

    Attributes:
        text: The call, as ``catalog.calls`` writes it.
        hot: Microseconds of its kernels, repeated on the same tensors.
        cold: Microseconds with the L2 cache full of other data, where measured.
        kernels: Number of kernels.
        tf32: fp32 products could use TF32.
        local: A library ran another kernel than for sizes around it: the point counts for sizes near its own only.
    """

    text: str
    hot: float
    cold: float | None
    kernels: int
    tf32: bool
    local: bool = False

    @property
    def call(self) -> Call:
        """The call; ``ValueError`` where the text is not one."""
        return from_text(self.text)

    @property
    def operator(self) -> str:
        """Name of the operator."""
        return self.text.partition("(")[0]


class CollectivePoint(NamedTuple):
    """A collective that was timed on the links of a machine.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, or send (one direction, from one rank to another).
        ranks: Number of ranks that took part.
        nodes: Number of machines that they ran on.
        bytes: Size of the whole message, as nccl-tests counts it: output of an all-gather, input of a reduce-scatter.
        seconds: GPU seconds of a call, without the CPU's time to launch it.
    """

    kind: str
    ranks: int
    nodes: int
    bytes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """A calibration file.

    Attributes:
        environment: GPU, driver, versions, processor, date.
        points: Operator calls that were timed.
        sections: The other parts of the file, unchanged (``device``: launches, waits, memory; ``host``: the CPU).
        source: File name, or ``shipped: NAME``.
        left_out: Operators that could not be measured.
        content: The whole file; of one that ships, without the points.
        collectives: Collectives that were timed, on a machine with several GPUs.
    """

    environment: Mapping[str, Any]
    points: Sequence[Point]
    sections: Mapping[str, Any]
    source: str
    left_out: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)
    collectives: tuple[CollectivePoint, ...] = ()

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU."""
        major, minor = self.environment["capability"]
        return int(major), int(minor)

    @property
    def gpu(self) -> str:
        """Name of the GPU, as its driver gives it."""
        return str(self.environment["gpu"])

    @property
    def known_gpu(self) -> GPU | None:
        """The GPU's entry in the catalogue; ``None`` where it is not listed."""
        try:
            return find_gpu(self.gpu)
        except WorkloadError:
            return None

    def is_of(self, wanted: GPU) -> bool:
        """Return whether it was measured on such a GPU.

        A GPU that the user described (``gpu: {base: ...}``) may be one that the catalogue does not list.
        """
        known = self.known_gpu
        if known is not None:
            same = (known.device_name, known.capability, known.multiprocessors)
            return same == (wanted.device_name, wanted.capability, wanted.multiprocessors)
        return wanted.capability == self.capability and "given by the user" in wanted.assumed.values()

    def check(self, wanted: GPU) -> None:
        """Check that the calibration applies to ``wanted``.

        It applies to GPUs of its own kind, and to those of the same compute capability (their kernels are the same)
        where a data sheet is known to scale by.

        Raises:
            WorkloadError: It does not apply; the message names both GPUs.
        """
        alike = self.known_gpu is not None and self.capability == wanted.cost_capability
        if self.is_of(wanted) or alike:
            return
        known, ours, theirs = self.known_gpu, _dotted(self.capability), _dotted(wanted.capability)
        measured = f"calibration {self.source}: it was measured on {self.gpu} (compute capability {ours})"
        instead = f"Predict for gpu {known.id}, or" if known is not None else "Either"
        why = "which runs other kernels" if ours != theirs else "and no data sheet of the former is known to scale by"
        if known is None and ours == theirs:
            instead = f"Describe that GPU (gpu: {{base: {wanted.id}, memory_bytes: ...}}), or"
        raise WorkloadError(
            f"{measured}, and the prediction is for {wanted.name} ({theirs}), {why}. {instead} run `trainatomy "
            "calibrate` on the GPU that you predict for, or leave the calibration out."
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def resolve_calibration(calibration: Calibration | Path | str | None) -> Calibration | None:
    """Return the calibration; load it if ``calibration`` is a path."""
    return load(Path(calibration)) if isinstance(calibration, Path | str) else calibration


def load(path: Path) -> Calibration:
    """Load a calibration file or folder; raises ``WorkloadError`` where it is not one."""
    try:
        content = _content_of(path)
    except OSError as error:
        raise WorkloadError(f"calibration {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        why = "it is not text"
        raise WorkloadError(f"calibration {path}: not a file that `trainatomy calibrate` wrote ({why})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"calibration {path}: its files do not form one calibration ({error})") from None
    return parse(content, str(path))


def parse(text: str | dict[str, Any], source: str, *, parses_calls: bool = True) -> Calibration:
    """Parse a calibration file.

    Args:
        text: The file, or its content.
        source: Its name in errors.
        parses_calls: Whether to check each call now.  Without it, a call is parsed when it is first needed.

    Raises:
        WorkloadError: If it is not a calibration file.
    """
    try:
        content = json.loads(text) if isinstance(text, str) else text
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        schema = content["schema"]
        if schema != SCHEMA:
            raise WorkloadError(
                f"calibration {source}: its schema is {schema!r}, and this version reads {SCHEMA!r}; "
                "run `trainatomy calibrate` of this version again"
            )
        sections = dict(content["sections"])
        kernels = sections.pop("kernels", {})
        points = tuple(_point(entry) for entry in kernels.get("points", ()))
        if parses_calls:
            _ = [point.call for point in points]
        links = sections.pop("collectives", {})
        left_out = tuple(map(str, (*kernels.get("left_out", ()), *links.get("left_out", ()))))
        collectives = tuple(_collective(entry) for entry in links.get("points", ()))
        found = Calibration(content["environment"], points, sections, source, left_out, content, collectives)
        _ = found.gpu, found.capability, found.environment["date"]
        _check_numbers(sections)
        return found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, json.JSONDecodeError):
            what = f"it is not JSON: {error}"
        raise WorkloadError(f"calibration {source}: not a file that `trainatomy calibrate` wrote ({what})") from None


_DEVICE_ROWS = {"launches": ("bytes", "period_us"), "memory": ("bytes", "malloc_us", "free_us")}


def _check_numbers(sections: Mapping[str, Any]) -> None:
    """Check that there are numbers where the timing model reads them; raises what ``parse`` explains."""
    device, host = sections.get("device", {}), sections.get("host", {})
    for name, keys in _DEVICE_ROWS.items():
        for row in device.get(name, ()):
            for key in keys:
                _measured(row[key])
    for value in (*device.get("waiting", {}).values(), *host.get("factors", {}).values()):
        _measured(value)


def _point(entry: Mapping[str, Any]) -> Point:
    cold = entry.get("cold_us")
    return Point(
        str(entry["call"]),
        _measured(entry["us"]),
        None if cold is None else _measured(cold),
        int(entry["kernels"]),
        bool(entry.get("tf32", False)),
        bool(entry.get("local", False)),
    )


def _collective(entry: Mapping[str, Any]) -> CollectivePoint:
    ranks, nodes, size, seconds = (_measured(entry[key]) for key in ("ranks", "nodes", "bytes", "seconds"))
    if ranks < 2 or not seconds:
        raise ValueError(f"a collective of {ranks:g} ranks that takes {seconds:g} s cannot have been measured")
    return CollectivePoint(str(entry["kind"]), int(ranks), int(nodes), int(size), seconds)


def _measured(value: Any) -> float:
    """Convert a measured number; raises ``ValueError`` for a value that cannot be one."""
    found = float(value)
    if not 0 <= found < math.inf:
        raise ValueError(f"{value} cannot have been measured")
    return found


@cache
def shipped() -> Mapping[str, Calibration]:
    """Return the calibrations that ship, by the id of their GPU."""
    found = {}
    for entry in sorted(files(__package__).joinpath("calibrations").iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() or entry.name.endswith(".json"):
            source = f"shipped: {entry.name}"
            content = _main_content_of(entry) if entry.is_dir() else _content_of(entry)
            calibration = parse(content, source, parses_calls=False)
            points = PointsOfFolder(entry) if entry.is_dir() else calibration.points
            found[entry.name.removesuffix(".json")] = replace(calibration, points=points)
    return found


class PointsOfFolder(Sequence[Point]):
    """The points of a calibration that ships, read when one is asked for: compiled efficiencies need none of them."""

    def __init__(self, folder: Traversable) -> None:
        self._folder = folder

    @cached_property
    def _points(self) -> tuple[Point, ...]:
        whole = cast("dict[str, Any]", _content_of(self._folder))
        return tuple(_point(entry) for entry in whole["sections"]["kernels"]["points"])

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Point]: ...
    def __getitem__(self, index: int | slice) -> Point | Sequence[Point]:
        return self._points[index]

    def __len__(self) -> int:
        return len(self._points)

    def __bool__(self) -> bool:
        return True  # without reading them


def _main_content_of(folder: Traversable) -> dict[str, Any]:
    """Return the content of the file of a folder that has all but the points."""
    whole: dict[str, Any] = json.loads(folder.joinpath(WHOLE).read_text(encoding="utf-8"))
    return whole


def _content_of(entry: Traversable) -> str | dict[str, Any]:
    """Return the text of a calibration file, or what the files of a folder are together."""
    if not entry.is_dir():
        return entry.read_text(encoding="utf-8")
    parts = sorted((part for part in entry.iterdir() if part.name.endswith(".json")), key=lambda part: part.name)
    whole = _main_content_of(entry)
    points = whole["sections"]["kernels"]["points"]
    for part in parts:
        if part.name != WHOLE:
            points += json.loads(part.read_text(encoding="utf-8"))["points"]
    return whole
