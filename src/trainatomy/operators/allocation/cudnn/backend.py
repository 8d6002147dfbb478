"""The part of cuDNN's backend API that answers which plans it would choose, called by ctypes.

The API is documented in https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html; the
numbers are those of ``cudnn_graph.h`` and are part of the binary interface. From version 9.8 on heuristics and plans
take a description of a GPU in place of a handle, so that they answer without a GPU and without a driver.

Find and load cuDNN's library where it is installed.

It comes with PyTorch's CUDA builds (``nvidia-cudnn-cu13``), or alone with ``pip install "trainatomy[cudnn]"``. It needs
neither a GPU nor a driver for what is asked here. cuDNN ends the process if it does not find one of its own files or
cuBLASLt, so that both are looked for before.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.errors import MissingLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


VARIABLE = "TRAINATOMY_CUDNN"
"""Environment variable: the library's file, or ``none`` to do without."""
EXTRA = 'pip install "trainatomy[cudnn]"'
_FILE = "libcudnn.so.9"
_PARTS = ("graph", "heuristic", "ops", "cnn", "engines_precompiled", "engines_runtime_compiled")
"""The files of cuDNN that choosing a plan loads."""
_BUILDS = (13, 12)
"""Major versions of CUDA that cuDNN is built for."""


@cache
def cudnn_library() -> Backend:
    """Return cuDNN's library, loaded once.

    Raises:
        MissingLibrary: It is not installed, too old to answer without a GPU, or cannot be loaded.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked.lower() == "none":
        raise MissingLibrary(f"cuDNN's library is switched off by {VARIABLE}=none", library="cudnn")
    file = Path(asked) if asked else next((found for found in _places(_FILE) if found.exists()), None)
    if file is None:
        raise MissingLibrary(f"cuDNN's library ({_FILE}) is not installed: {EXTRA}", library="cudnn")
    lacking = [f"libcudnn_{part}.so.9" for part in _PARTS if not file.with_name(f"libcudnn_{part}.so.9").exists()]
    if lacking:
        raise MissingLibrary(f"cuDNN's library {file} lacks {', '.join(lacking)} beside it: {EXTRA}", library="cudnn")
    try:
        backend = Backend(file)
    except OSError as error:
        raise MissingLibrary(f"cuDNN's library {file} cannot be loaded ({error}): {EXTRA}", library="cudnn") from None
    if backend.version < DEVICELESS:
        raise MissingLibrary(
            f"cuDNN {version_text(backend.version)} ({file}) does not answer without a GPU, "
            f"{version_text(DEVICELESS)} and newer do: {EXTRA}",
            library="cudnn",
        )
    _load_cublas(backend)
    return backend


def _load_cublas(backend: Backend) -> None:
    """Load the cuBLASLt that cuDNN will look for.

    Raises:
        MissingLibrary: It is not installed.
    """
    build = backend.cuda_version // 1000
    for name in (f"libcublasLt.so.{major}" for major in _BUILDS if major == build):
        for file in (*(found for found in _places(name) if found.exists()), name):
            try:
                ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return
    raise MissingLibrary(f"cuDNN's library needs cuBLAS of CUDA {build}, which is not installed: {EXTRA}")


def _places(name: str) -> Iterator[Path]:
    """Yield where a library of NVIDIA's may be: in its wheels, in PyTorch's, in conda's environment."""
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia else ():
        yield from sorted(Path(folder).glob(f"*/lib/{name}"))
    torch = importlib.util.find_spec("torch")
    for folder in torch.submodule_search_locations or () if torch else ():
        yield Path(folder) / "lib" / name
    yield Path(sys.prefix) / "lib" / name


DEVICELESS = 90800
"""The first version that answers without a GPU."""


class Kind(IntEnum):
    """Kinds of descriptors (``cudnnBackendDescriptorType_t``)."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    PLAN = 5
    KNOB_CHOICE = 7
    FORWARD = 10
    BACKWARD_FILTER = 11
    BACKWARD_DATA = 12
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Type(IntEnum):
    """Types of attributes (``cudnnBackendAttributeType_t``)."""

    HANDLE = 0
    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    CONVOLUTION_MODE = 7
    HEURISTIC_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    DESCRIPTOR = 15
    INT32 = 23
    CHAR = 24


class Attribute(IntEnum):
    """Attributes of descriptors (``cudnnBackendAttributeName_t``)."""

    CONVOLUTION_COMPUTE_TYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_STRIDES = 103
    CONVOLUTION_PADDING_AFTER = 104
    CONVOLUTION_PADDING_BEFORE = 105
    CONVOLUTION_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIG_ENGINE = 300
    CONFIG_KNOBS = 302
    PLAN_HANDLE = 400
    PLAN_CONFIG = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    KNOB_TYPE = 600
    KNOB_VALUE = 601
    GRAPH_HANDLE = 800
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_ID = 906
    ENGINE_INDEX = 1301
    ENGINE_NOTES = 1303
    DEVICE_ID = 2700
    DEVICE_HANDLE = 2701
    DEVICE_JSON = 2702


class Operand(IntEnum):
    """Attributes of an operation, counted from its first one (ALPHA)."""

    ALPHA = 0
    BETA = 1
    CONVOLUTION = 2
    WEIGHT = 3
    DATA = 4
    OUTPUT = 5


FIRST_OPERAND = {Kind.FORWARD: 700, Kind.BACKWARD_DATA: 706, Kind.BACKWARD_FILTER: 712}


class Mode(IntEnum):
    """Modes of the heuristics (``cudnnBackendHeurMode_t``)."""

    INSTANT = 0
    B = 1
    FALLBACK = 2


class Note(IntEnum):
    """Notes of engines about their arithmetic (``cudnnBackendNumericalNote_t``)."""

    TENSOR_CORE = 0
    DOWN_CONVERTS_INPUTS = 1
    NONDETERMINISTIC = 4


NOTES = 10
"""Number of numerical notes."""
KNOBS = 44
"""Number of kinds of knobs of an engine."""
_INTEGERS = {Type.INT64: ctypes.c_int64, Type.INT32: ctypes.c_int32}


def version_text(version: int) -> str:
    """Return a version as it is written: 91900 is 9.19.0."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


class BackendError(Exception):
    """An error that cuDNN returned."""


class Backend:
    """The library in a file.

    Args:
        path: The file ``libcudnn.so.9``; the other files of cuDNN are looked for beside it.

    Raises:
        OSError: The file is missing, or no library of this machine's kind.
    """

    def __init__(self, path: Path | str) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        self._library.cudnnGetErrorString.restype = ctypes.c_char_p
        self.version = int(self._library.cudnnGetVersion())
        """Ten thousands: major, hundreds: minor, rest: patch."""
        self._library.cudnnGetCudartVersion.restype = ctypes.c_size_t
        self.cuda_version = int(self._library.cudnnGetCudartVersion())
        """Version of CUDA that it was built for; thousands: major, tens: minor."""

    def descriptor(self, kind: Kind) -> Descriptor:
        """Return a new descriptor without attributes."""
        pointer = ctypes.c_void_p()
        self.check(self._library.cudnnBackendCreateDescriptor(int(kind), ctypes.byref(pointer)))
        return Descriptor(self, pointer)

    def handle(self) -> ctypes.c_void_p:
        """Return a handle of the current GPU."""
        handle = ctypes.c_void_p()
        self.check(self._library.cudnnCreate(ctypes.byref(handle)))
        return handle

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library."""
        self.check(getattr(self._library, name)(*arguments))

    def destroy(self, pointer: ctypes.c_void_p) -> None:
        """Free a descriptor."""
        self._library.cudnnBackendDestroyDescriptor(pointer)

    def device(self, text: str) -> Descriptor:
        """Return a GPU from the JSON text that cuDNN describes one with.

        Raises:
            BackendError: cuDNN does not understand the text, or does not run on the GPU.
        """
        return self.descriptor(Kind.DEVICE).set_text(Attribute.DEVICE_JSON, text).finalize()

    def check(self, status: int) -> None:
        """Raise an error if a call did not succeed."""
        if status:
            raise BackendError(self._library.cudnnGetErrorString(status).decode())


class Descriptor:
    """A descriptor of the backend API, freed with its last reference."""

    def __init__(self, backend: Backend, pointer: ctypes.c_void_p) -> None:
        self._backend = backend
        self.pointer = pointer
        self._kept: list[object] = []

    def __del__(self) -> None:
        self._backend.destroy(self.pointer)

    def set(self, attribute: int, kind: Type, *values: int | float | Descriptor | ctypes.c_void_p) -> Descriptor:
        """Set an attribute to one or more values."""
        array = _array(kind, values)
        self._kept.extend(value for value in values if isinstance(value, Descriptor))
        self._set(attribute, kind, len(values), array)
        return self

    def set_text(self, attribute: int, text: str) -> Descriptor:
        """Set an attribute to a text."""
        encoded = text.encode() + b"\0"
        self._set(attribute, Type.CHAR, len(encoded), encoded)
        return self

    def finalize(self) -> Descriptor:
        """Complete the descriptor; cuDNN checks it here.

        Raises:
            BackendError: cuDNN does not support what is described.
        """
        self._backend.call("cudnnBackendFinalize", self.pointer)
        return self

    def integers(self, attribute: int, kind: Type, most: int) -> list[int]:
        """Return at most ``most`` integers of an attribute."""
        array = (_INTEGERS.get(kind, ctypes.c_int) * most)()
        return [int(value) for value in array[: self._get(attribute, kind, most, array)]]

    def text(self, attribute: int) -> str:
        """Return the text of an attribute."""
        size = self._get(attribute, Type.CHAR, 0, None)
        array = ctypes.create_string_buffer(size)
        self._get(attribute, Type.CHAR, size, array)
        return array.raw.decode(errors="replace").rstrip("\0")

    def descriptors(self, attribute: int, kind: Kind, most: int) -> list[Descriptor]:
        """Return at most ``most`` descriptors of an attribute."""
        made = [self._backend.descriptor(kind) for _ in range(most)]
        array = (ctypes.c_void_p * most)(*(one.pointer for one in made))
        return made[: self._get(attribute, Type.DESCRIPTOR, most, array)]

    def count(self, attribute: int, kind: Type) -> int:
        """Return the number of values of an attribute."""
        return self._get(attribute, kind, 0, None)

    def _set(self, attribute: int, kind: Type, count: int, array: object) -> None:
        arguments = self.pointer, int(attribute), int(kind), ctypes.c_int64(count), array
        self._backend.call("cudnnBackendSetAttribute", *arguments)

    def _get(self, attribute: int, kind: Type, most: int, array: object) -> int:
        count = ctypes.c_int64()
        size = ctypes.c_int64(most)
        arguments = self.pointer, int(attribute), int(kind), size, ctypes.byref(count), array
        self._backend.call("cudnnBackendGetAttribute", *arguments)
        return min(count.value, most) if most else count.value


def _array(kind: Type, values: Sequence[Any]) -> object:
    if kind is Type.DESCRIPTOR:
        return (ctypes.c_void_p * len(values))(*(one.pointer for one in values))
    if kind is Type.HANDLE:
        return (ctypes.c_void_p * len(values))(*values)
    if kind is Type.FLOAT:
        return (ctypes.c_float * len(values))(*values)
    return (_INTEGERS.get(kind, ctypes.c_int) * len(values))(*values)
