"""A model that is loaded inside the simulated process, as ``from_pretrained`` loads one with quantised weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from trainatomy.simulator.placement import META, names_cuda


class HostTensors(TorchFunctionMode):
    """Lets every tensor that is made without a GPU's name be a meta tensor that stands for one in host memory.

    ``from_pretrained`` makes an empty model on ``meta`` and fills it; peft makes adapters on the CPU and moves them.
    Neither is in GPU memory, and neither needs values.

    Args:
        on_host: Context in which meta tensors that are made stand for tensors in host memory.
    """

    def __init__(self, on_host: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._on_host = on_host
        self._makers = _device_constructors() - {torch.tensor, torch.as_tensor, torch.asarray}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._makers or names_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        with self._on_host():
            return func(*args, **{**kwargs, "device": META})


@contextlib.contextmanager
def loading(on_host: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Load a model in the block.

    Weights that are stored quantised are copied by several threads at once in a real
    process, which takes the same memory; here one copies them, because the simulation belongs to one thread.

    Args:
        on_host: Context in which meta tensors that are made stand for tensors in host memory.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", HF_DEACTIVATE_ASYNC_LOAD="1"))
        stack.enter_context(HostTensors(on_host))
        yield
