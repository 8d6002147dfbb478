"""Find and load cuDNN's library where it is installed.

It comes with PyTorch's CUDA builds (``nvidia-cudnn-cu13``), or alone with ``pip install "trainatomy[cudnn]"``. It needs
neither a GPU nor a driver for what is asked here. cuDNN ends the process if it does not find one of its own files or
cuBLASLt, so that both are looked for before.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainatomy.errors import MissingLibrary
from trainatomy.operators.allocation.cudnn.backend import DEVICELESS, Backend, version_text

if TYPE_CHECKING:
    from collections.abc import Iterator

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
