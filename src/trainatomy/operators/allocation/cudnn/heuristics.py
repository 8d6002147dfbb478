"""The plans that cuDNN offers for a convolution, in the order in which PyTorch tries them.

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp, torch 2.9-2.13 (``run_single_conv``, ``get_configs_from_heuristics``,
``filterEngineConfigs``, ``try_configs``), ``cudnn.benchmark`` off. PyTorch asks the instant heuristics (mode B where
``TORCH_CUDNN_USE_HEURISTIC_MODE_B`` is set), then the fallback list; leaves out engines that convert their inputs to a
shorter type, for fp32 without TF32 those on tensor cores, and with ``deterministic`` those that are not; makes a plan
of one configuration after the other and keeps the first that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainatomy.operators.allocation.cudnn import backend
from trainatomy.operators.allocation.cudnn.backend import (
    Attribute,
    Backend,
    BackendError,
    Descriptor,
    Mode,
    Note,
    Operand,
    Type,
    version_text,
)

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Mapping, Sequence

    from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

DATA_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
"""``cudnnDataType_t`` of the types."""
_OPERATIONS = {
    "forward": backend.Kind.FORWARD,
    "input gradient": backend.Kind.BACKWARD_DATA,
    "weight gradient": backend.Kind.BACKWARD_FILTER,
}
_CROSS_CORRELATION = 1
_WORKSPACE_KNOB, CLUSTER_KNOB = 25, 27
"""``CUDNN_KNOB_TYPE_WORKSPACE`` and ``CUDNN_KNOB_TYPE_TILE_CGA_M``."""
LISTED = 3
"""Plans of a list that are written down as text."""
_ALIGNMENT = 32
"""Bytes: the largest alignment that PyTorch looks for (``getAlignment``); blocks of its allocator have 512."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A plan of cuDNN: an engine, its knobs, the bytes of workspace that it needs.

    Attributes:
        last: It is of the fallback list.
        listed: The first plans of the list that it is from, as text.
    """

    engine: int
    knobs: tuple[tuple[int, int], ...]
    notes: tuple[int, ...]
    workspace: int
    last: bool = False
    listed: tuple[str, ...] = ()

    @property
    def divides_sums(self) -> bool:
        """Return whether a kernel may divide sums among the multiprocessors (stream-K): clusters, with workspace."""
        knobs = dict(self.knobs)
        return CLUSTER_KNOB in knobs and knobs.get(_WORKSPACE_KNOB) == 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings of PyTorch that decide about plans."""

    tf32: bool = True
    deterministic: bool = False
    mode: Mode = Mode.INSTANT

    def allows(self, notes: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether PyTorch tries an engine with these numerical notes."""
        if Note.DOWN_CONVERTS_INPUTS in notes:
            return False
        if self.deterministic and Note.NONDETERMINISTIC in notes:
            return False
        return self.tf32 or dtype != torch.float32 or Note.TENSOR_CORE not in notes


def plans(
    kind: Kind, one: Convolution, library: Backend, target: Descriptor | ctypes.c_void_p, choice: Choice
) -> Iterator[EnginePlan]:
    """Yield the plans of an operation of a convolution, in the order in which PyTorch tries them.

    Args:
        kind: The operation.
        one: The convolution.
        library: cuDNN.
        target: A finalised description of a GPU, or a handle of one.
        choice: PyTorch's settings.
    """
    graph = _graph(kind, one, library, target)
    for mode in (choice.mode, Mode.FALLBACK):
        configurations = _configurations(graph, mode, library, target)
        listed = tuple(_text(config) for config in configurations[:LISTED])
        for config in configurations:
            engine = config.descriptors(Attribute.CONFIG_ENGINE, backend.Kind.ENGINE, 1)[0]
            notes = engine.integers(Attribute.ENGINE_NOTES, Type.NUMERICAL_NOTE, backend.NOTES)
            if not choice.allows(notes, one.dtype):
                continue
            try:
                workspace = _workspace(config, library, target)
            except BackendError:
                continue
            index = engine.integers(Attribute.ENGINE_INDEX, Type.INT64, 1)[0]
            yield EnginePlan(index, _knobs(config), tuple(notes), workspace, mode is Mode.FALLBACK, listed)


def _text(config: Descriptor) -> str:
    """Return an engine and its knobs, as ``67 2=0 13=0 25=1``."""
    engine = config.descriptors(Attribute.CONFIG_ENGINE, backend.Kind.ENGINE, 1)[0]
    index = engine.integers(Attribute.ENGINE_INDEX, Type.INT64, 1)[0]
    return " ".join([str(index), *(f"{kind}={value}" for kind, value in _knobs(config))])


def _workspace(config: Descriptor, library: Backend, target: Descriptor | ctypes.c_void_p) -> int:
    """Return the bytes of workspace of the plan of a configuration.

    Raises:
        BackendError: The engine does not support the call.
    """
    plan = library.descriptor(backend.Kind.PLAN)
    _aim(plan, target, Attribute.PLAN_DEVICE, Attribute.PLAN_HANDLE)
    plan.set(Attribute.PLAN_CONFIG, Type.DESCRIPTOR, config).finalize()
    return plan.integers(Attribute.PLAN_WORKSPACE, Type.INT64, 1)[0]


def _knobs(config: Descriptor) -> tuple[tuple[int, int], ...]:
    choices = config.descriptors(Attribute.CONFIG_KNOBS, backend.Kind.KNOB_CHOICE, backend.KNOBS)
    kinds = [one.integers(Attribute.KNOB_TYPE, Type.KNOB_TYPE, 1)[0] for one in choices]
    values = [one.integers(Attribute.KNOB_VALUE, Type.INT64, 1)[0] for one in choices]
    return tuple(sorted(zip(kinds, values, strict=True)))


def _configurations(
    graph: Descriptor, mode: Mode, library: Backend, target: Descriptor | ctypes.c_void_p
) -> list[Descriptor]:
    """Return the configurations of engines that the heuristics offer; none where they have no answer."""
    asked = library.descriptor(backend.Kind.HEURISTICS)
    asked.set(Attribute.HEURISTICS_GRAPH, Type.DESCRIPTOR, graph)
    asked.set(Attribute.HEURISTICS_MODE, Type.HEURISTIC_MODE, mode)
    try:
        _aim(asked, target, Attribute.HEURISTICS_DEVICE, None).finalize()
    except BackendError:
        return []
    count = asked.count(Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR)
    return asked.descriptors(Attribute.HEURISTICS_RESULTS, backend.Kind.ENGINE_CONFIG, count) if count else []


def _aim(one: Descriptor, target: Descriptor | ctypes.c_void_p, device: int, handle: int | None) -> Descriptor:
    """Set the GPU, or its handle, of a descriptor."""
    if isinstance(target, backend.Descriptor):
        return one.set(device, Type.DESCRIPTOR, target)
    return one if handle is None else one.set(handle, Type.HANDLE, target)


def _graph(kind: Kind, one: Convolution, library: Backend, target: Descriptor | ctypes.c_void_p) -> Descriptor:
    """Return the graph of one operation."""
    shapes = {Operand.DATA: one.data, Operand.WEIGHT: one.weight, Operand.OUTPUT: one.output}
    names = {Operand.DATA: "x", Operand.WEIGHT: "w", Operand.OUTPUT: "y"}
    operation = library.descriptor(_OPERATIONS[kind])
    first = backend.FIRST_OPERAND[_OPERATIONS[kind]]
    operation.set(first + Operand.ALPHA, Type.FLOAT, 1.0).set(first + Operand.BETA, Type.FLOAT, 0.0)
    operation.set(first + Operand.CONVOLUTION, Type.DESCRIPTOR, _settings(one, library))
    for operand, shape in shapes.items():
        operation.set(first + operand, Type.DESCRIPTOR, _tensor(shape, names[operand], one, library))
    operation.finalize()
    graph = library.descriptor(backend.Kind.GRAPH).set(Attribute.GRAPH_OPERATIONS, Type.DESCRIPTOR, operation)
    if not isinstance(target, backend.Descriptor):
        graph.set(Attribute.GRAPH_HANDLE, Type.HANDLE, target)
    return graph.finalize()


def _settings(one: Convolution, library: Backend) -> Descriptor:
    """Return the descriptor of strides, padding and dilation; sums of 16-bit types are made in fp32."""
    compute = torch.float64 if one.dtype == torch.float64 else torch.float32
    made = library.descriptor(backend.Kind.CONVOLUTION)
    made.set(Attribute.CONVOLUTION_COMPUTE_TYPE, Type.DATA_TYPE, DATA_TYPES[compute])
    made.set(Attribute.CONVOLUTION_MODE, Type.CONVOLUTION_MODE, _CROSS_CORRELATION)
    made.set(Attribute.CONVOLUTION_DIMENSIONS, Type.INT64, len(one.strides))
    made.set(Attribute.CONVOLUTION_DILATIONS, Type.INT64, *one.dilation)
    made.set(Attribute.CONVOLUTION_STRIDES, Type.INT64, *one.strides)
    made.set(Attribute.CONVOLUTION_PADDING_BEFORE, Type.INT64, *one.padding)
    made.set(Attribute.CONVOLUTION_PADDING_AFTER, Type.INT64, *one.padding)
    return made.finalize()


def _tensor(shape: Sequence[int], name: str, one: Convolution, library: Backend) -> Descriptor:
    made = library.descriptor(backend.Kind.TENSOR)
    made.set(Attribute.TENSOR_TYPE, Type.DATA_TYPE, DATA_TYPES[one.dtype])
    made.set(Attribute.TENSOR_DIMENSIONS, Type.INT64, *shape)
    made.set(Attribute.TENSOR_STRIDES, Type.INT64, *_strides(shape, one.channels_last))
    made.set(Attribute.TENSOR_ID, Type.INT64, ord(name))
    return made.set(Attribute.TENSOR_ALIGNMENT, Type.INT64, _ALIGNMENT).finalize()


def _strides(shape: Sequence[int], last: bool) -> list[int]:
    """Return the strides of a dense tensor, with channels before or after the places."""
    order = [1, *range(len(shape) - 1, 1, -1), 0] if last else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension]
    return strides


class Heuristics:
    """Choices of cuDNN on a GPU, asked without it.

    Attributes:
        version: cuDNN's version, "9.19.0".
    """

    def __init__(self, library: Backend, text: str, mode: Mode = Mode.INSTANT) -> None:
        """Describe the GPU to cuDNN.

        Args:
            library: cuDNN.
            text: The GPU (see ``catalog.cudnn.device_text``).
            mode: The heuristics that PyTorch asks first.

        Raises:
            BackendError: cuDNN does not run on the GPU.
        """
        self.version = version_text(library.version)
        self._library, self._mode, self._device = library, mode, library.device(text)
        self._known: dict[object, EnginePlan | None] = {}
        self._offered: dict[object, tuple[EnginePlan, ...]] = {}

    def plan(self, kind: Kind, one: Convolution, *, tf32: bool, deterministic: bool) -> EnginePlan | None:
        """Return the first plan of an operation of a convolution; None where cuDNN offers none."""
        key = kind, one.key, tf32, deterministic
        if key not in self._known:
            choice = Choice(tf32, deterministic, self._mode)
            try:
                self._known[key] = next(plans(kind, one, self._library, self._device, choice), None)
            except BackendError:
                self._known[key] = None
        return self._known[key]

    def offered(self, kind: Kind, one: Convolution, *, tf32: bool, deterministic: bool) -> tuple[EnginePlan, ...]:
        """Return all plans of an operation in PyTorch's order, which ``cudnn.benchmark`` tries; () where none is."""
        key = kind, one.key, tf32, deterministic
        if key not in self._offered:
            choice = Choice(tf32, deterministic)
            try:
                self._offered[key] = tuple(plans(kind, one, self._library, self._device, choice))
            except BackendError:
                self._offered[key] = ()
        return self._offered[key]


def mode_of(environment: Mapping[str, str]) -> Mode:
    """Return the heuristics that PyTorch asks first, by its environment variable (``cudnnv8_use_heur_mode_b``)."""
    return Mode.B if environment.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1" else Mode.INSTANT
