"""bitsandbytes' optimizers on meta tensors.

Their Python code makes the states, and its custom operators have kernels for meta tensors that change nothing, so that
8-bit optimizers run unmodified: a parameter of n >= 4096 elements has two uint8 states of n elements and two fp32
scales of ceil(n / 256); a smaller one has two fp32 states; all share two tables of 256 fp32.  Only paged states need
help: a library call allocates them with ``cudaMallocManaged``, outside PyTorch's caching allocator.  Source:
bitsandbytes 0.45-0.50, optim/optimizer.py and functional.py.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.operators.allocation.whole import one_operation
from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType


@contextlib.contextmanager
def simulated_bitsandbytes(
    host_memory: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[list[torch.Tensor]]:
    """Let bitsandbytes' optimizers step on meta tensors; yields the paged states, as a list that grows.

    Enter it before the simulated process, as the library looks for a GPU when it is imported.

    Args:
        host_memory: Context in which tensors are made that do not lie on the GPU.

    Raises:
        MissingLibrary: bitsandbytes is not installed.
    """
    functional, optimizer = _library()
    pages = optimizer.F.GlobalPageManager.get_instance()
    overrides = optimizer.GlobalOptimManager.get_instance()
    paged: list[torch.Tensor] = []

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
        with host_memory():
            state = torch.empty(shape, dtype=dtype, device="meta")
        state.is_paged, state.page_deviceid = True, 0  # type: ignore[attr-defined]
        paged.append(state)
        return state

    with contextlib.ExitStack() as stack:
        for name, replacement in _replacements(get_paged).items():
            stack.enter_context(mock.patch.object(functional, name, replacement))
        stack.enter_context(mock.patch.object(pages, "paged_tensors", []))
        for name in ("pid2config", "index2config"):
            stack.enter_context(mock.patch.dict(getattr(overrides, name)))
        triples = list(overrides.module_weight_config_triple)
        stack.enter_context(mock.patch.object(overrides, "module_weight_config_triple", triples))
        yield paged


_WITHOUT_BFLOAT16 = ("momentum", "rmsprop", "adagrad", "lars")
"""Optimizers without a 32-bit kernel for bfloat16 (backends/cuda/ops.py, ``str2optimizer32bit``, bitsandbytes 0.50)."""
_MANAGED_UNIT = 128 * 2**20
"""Multiple that the GPU's used memory grew by for managed memory: 128 MiB for 168 paged states of together 21 MiB, and
256 MiB for 192 of together 168 MiB (two trainings on an H200, driver 580.159; lab/everyday)."""


def paged_notes(paged: Sequence[torch.Tensor]) -> Iterator[str]:
    """Yield a note on paged states, which are outside of PyTorch's allocator and of the process's figure.

    Before a parameter is updated, ``prefetch_state`` asks the driver to move its states to the GPU
    (``cudaMemPrefetchAsync``),
    where they stay until the driver needs the room (bitsandbytes 0.50, optim/optimizer.py).
    """
    size = sum(state.nbytes for state in paged)
    if size:
        most = human_bytes(-(-size // _MANAGED_UNIT) * _MANAGED_UNIT)
        yield (
            f"{human_bytes(size)} of paged optimizer states move to the GPU in each step and stay there while it has "
            f"room, outside of the process's memory: the GPU may show up to {most} more than is predicted"
        )


def _replacements(get_paged: Callable[..., torch.Tensor]) -> dict[str, Callable[..., Any]]:
    """Return replacements by their names in bitsandbytes.functional.

    The updates write in place and allocate nothing but the norm that LAMB and LARS need.
    """

    def update_32bit(optimizer_name: str, g: torch.Tensor, p: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if optimizer_name in _WITHOUT_BFLOAT16 and g.dtype == torch.bfloat16:
            raise WorkloadError(
                f"train.optim: bitsandbytes has no 32-bit kernel of {optimizer_name} for bfloat16 gradients: its step "
                "fails on a GPU; parameters of less than 4096 numbers use it with 8 bits, too. Use weights in float32 "
                "(model.dtype: float32), or another optimizer",
                key="train.optim",
            )
        if kwargs.get("max_unorm", 0.0) > 0.0:
            torch.norm(p.data.float())
        _update("optimizer_update_32bit", (g, p, *args), kwargs)

    def update_8bit(optimizer_name: str, g: torch.Tensor, p: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        _update("optimizer_update_8bit_blockwise", (g, p, *args), kwargs)

    return {
        "get_paged": get_paged,
        "fill": _no_op,
        "prefetch_tensor": _no_op,
        "optimizer_update_32bit": update_32bit,
        "optimizer_update_8bit_blockwise": update_8bit,
    }


def _update(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write one kernel that updates its parameter and states; the gradient is its first tensor."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    with one_operation(f"bitsandbytes::{name}", *tensors, written=tuple(range(1, len(tensors)))):
        pass


def _no_op(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a kernel or prefetch without data."""


def _library() -> tuple[ModuleType, ModuleType]:
    """Import bitsandbytes.functional and its optimizers without the advice about kernels for the CPU."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes.functional"), importlib.import_module(
            "bitsandbytes.optim.optimizer"
        )
    except ImportError as error:
        raise MissingLibrary(
            "this optimizer needs bitsandbytes, which is not installed: pip install bitsandbytes",
            library="bitsandbytes",
        ) from error
    finally:
        logger.setLevel(level)
