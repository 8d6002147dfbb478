"""torchao's packed weights in the simulated process: tensor subclasses whose Python runs as it is.

A packed weight is a tensor without memory around tensors with integers and scales.  Products with it are functions that
the subclass brings along (``implements_torch_function``): Python that casts the integers and calls PyTorch's operators,
which are simulated as all others.  So what a layer keeps for backward is what the installed version keeps.

Source: torchao 0.17-0.18, utils.py (``TorchAOBaseTensor``) and quantization/quantize_/workflows/.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from trainatomy.libraries import import_library
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.training.quantization import quantising_libraries
from trainatomy.training.stored_weights import is_packed_type

if TYPE_CHECKING:
    from trainatomy.simulator.process import SimulatedProcess


_MAKE = "_make_wrapper_subclass"


def packed_function(func: Any, types: Iterable[type]) -> Callable[..., Any] | None:
    """Return what a packed weight runs in place of a function of PyTorch, None where it runs the function itself."""
    for kind in types:
        if is_packed_type(kind):
            own = getattr(kind, "_TORCH_FN_TABLE", {}).get(kind, {}).get(func)
            if own is not None:
                found: Callable[..., Any] = own
                return found
    return None


@contextlib.contextmanager
def packed_weights(process: SimulatedProcess) -> Iterator[None]:
    """Let packed weights run in a process; tensors without memory that stand for them are meta tensors too."""
    original = getattr(torch.Tensor, _MAKE)

    def make(kind: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_packed_type(kind):
            kwargs["device"] = "meta"
        made: torch.Tensor = original(kind, *args, **kwargs)
        return made

    process.recorder.has_packed = process.functions.has_packed = True
    with mock.patch.object(torch.Tensor, _MAKE, staticmethod(make)):
        yield


ADAPTER = Adapter(
    is_used=lambda workload, model: model is not None and "torchao" in quantising_libraries(workload, model),
    simulated=lambda process, workload: packed_weights(process),
    load=lambda _: import_library("torchao", "model.quantization"),
    modules=("torchao",),
)
