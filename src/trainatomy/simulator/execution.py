"""Executes operations on meta tensors, and explains why one cannot be executed without data."""

from __future__ import annotations

import re
from typing import Any

import torch

from trainatomy.errors import SimulationError
from trainatomy.simulator.data_dependent import assumed_values
from trainatomy.simulator.meta_results import results_of_process
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.values import Values

_NO_TYPE = re.compile(r"^\"\w+\" not implemented for '(\w+)'")
_NO_SPARSE = re.compile(r"^Could not run '([\w:.]+)' with arguments from the 'Sparse")
_FILLS = frozenset({"aten::masked_fill", "aten::masked_fill_"})
_CLASSES = {"aten::nll_loss_forward": 1, "aten::nll_loss_backward": 2}
"""Positions of arguments that hold classes, which may be uint8 on a GPU (aten/src/ATen/native/cuda/Loss.cu)."""


class MetaExecution:
    """Executor of operations on meta tensors; their results hold no data.

    Attributes:
        results: Runs the meta kernels, and remembers what they returned.
    """

    def __init__(self, values: Values, modules: ModuleTracker) -> None:
        """Take the values of tensors that are known, and the tracker of the current module."""
        self.results = results_of_process()
        self._values = values
        self._modules = modules

    def run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation.

        A number in host memory may fill a tensor of the GPU (aten/src/ATen/native/cuda/IndexKernel.cpp,
        ``masked_fill__cuda``), while the meta kernel asks for both on one device; and it asks for classes in int64.

        Raises:
            SimulationError: Its result depends on data.
        """
        if name in _FILLS and isinstance(args[2], torch.Tensor) and not args[2].is_meta:
            func, args = func._overloadpacket.Scalar, (*args[:2], args[2].item())
        if (classes := _CLASSES.get(name)) is not None and args[classes].dtype == torch.uint8:
            args = (*args[:classes], torch.empty_like(args[classes], dtype=torch.long), *args[classes + 1 :])
        try:
            return self.results.run(func, args, kwargs)
        except NotImplementedError as error:
            if name == "aten::_to_copy" and _goes_to_host(kwargs):
                copied = self._copy_to_host(args[0], kwargs.get("dtype"))
                if copied is not None:
                    return copied
            module = self._modules.current()
            raise SimulationError(
                f"{name} in {module or 'the training loop'} cannot be executed without {_cause(name, error)} "
                f"(PyTorch says: {str(error).splitlines()[0][:200]})",
                operation=name,
                module=module or None,
            ) from error

    def _copy_to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Return a tensor of the GPU as the host reads it: its values where they are known, else assumed ones."""
        known = self._values.of(tensor, with_data=not tensor.is_floating_point())
        return assumed_values(tensor, dtype) if known is None else known.to(dtype or known.dtype, copy=True)


_MEASURE = "Measure this model with `trainatomy measure`, or replace the operation"


def _cause(name: str, error: NotImplementedError) -> str:
    """Return what an operation lacks, why PyTorch cannot run it on meta tensors, and what to do."""
    if found := _NO_TYPE.search(str(error)):
        return f"a kernel for {found[1]}: PyTorch has none on a GPU either.\nConvert its input to float32"
    if found := _NO_SPARSE.search(str(error)):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(found[1], "SparseCPU"):
            return (
                f"a kernel for sparse tensors ({found[1]}): PyTorch has none on a GPU either.\nIf it clips the "
                "gradients of nn.Embedding(sparse=True), set train.max_grad_norm: 0, or leave sparse out"
            )
        return f"a kernel for sparse tensors ({found[1]}) that needs no data.\n{_MEASURE}"
    if name.startswith("aten::"):
        return f"data: its result depends on values that do not exist in a run without a GPU.\n{_MEASURE}"
    return f"data: its extension registers no kernel for meta tensors (torch.library.register_fake).\n{_MEASURE}"


def _goes_to_host(kwargs: dict[str, Any]) -> bool:
    """Return whether an operation copies to host memory."""
    device = kwargs.get("device")
    return device is not None and device.type == "cpu"
