"""``tensor.data = other`` and ``tensor.grad = other`` between tensors with data and tensors without.

PyTorch allows the first between the CPU and a GPU (``VariableHooks::set_data``), but not between tensors with data and
meta tensors, which stand for the GPU's and for the host's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.training.packed_weights import is_packed

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def assignments(
    keep_on_host: Callable[[torch.Tensor], None],
    part_of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[Any, Handler]:
    """Return handlers of the setters of ``data`` and ``grad``.

    A tensor without data takes one of the host with data as one without.  One with data becomes one without when it
    takes the data of such a tensor, and takes zeros for a gradient without data.

    Args:
        keep_on_host: Lets a meta tensor stand for one in host memory.
        part_of: Returns what a rank holds of a tensor.
    """
    data: Any = torch.Tensor.data
    gradient: Any = torch.Tensor.grad

    def plain(tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not is_packed(tensor)

    def assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, value = args
        with torch._C.DisableTorchFunction():
            if not plain(tensor) or not plain(value) or part_of(tensor).is_meta == part_of(value).is_meta:
                return func(tensor, value)
            with _disable_current_modes():
                if part_of(tensor).is_meta:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                    keep_on_host(value)
                elif func == gradient.__set__:
                    value = torch.zeros(value.shape, dtype=value.dtype)
                else:
                    torch._C._swap_tensor_impl(tensor, value.detach().requires_grad_(tensor.requires_grad))
                    return None
            return func(tensor, value)

    return {data.__set__: assign, gradient.__set__: assign}
