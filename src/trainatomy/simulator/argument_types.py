"""Types of arguments that CUDA's kernels refuse, although PyTorch's meta kernels take them.

A float32 batch for a model in bfloat16, labels of 32 bits, or ``index_add`` of what autocast made: each is an error on
a GPU.  Found by calling the samples of PyTorch's own operator tests (``torch.testing._internal``, 2.13) with one
argument of another type, and checked in the source of the CUDA kernels (aten/src/ATen/native, ``cuda/``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ONE_TYPE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    "addmm": ("self", "mat1", "mat2"),
    "addbmm": ("self", "batch1", "batch2"),
    "mv": ("self", "vec"),
    "addmv": ("self", "mat", "vec"),
    **dict.fromkeys(("linear", "convolution"), ("input", "weight", "bias")),  # linear is seen in inference mode only
    **dict.fromkeys(("native_layer_norm", "native_group_norm"), ("input", "weight", "bias")),
    **dict.fromkeys(("index_add", "index_copy", "index_reduce", "put"), ("self", "source")),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), ("self", "values")),
    "binary_cross_entropy": ("self", "target", "weight"),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), ("self", "weight")),
    "huber_loss_backward": ("grad_output", "self", "target"),
    "_cdist_forward": ("x1", "x2"),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"), ("input", "grid")),
    "linalg_cross": ("self", "other"),
    "complex": ("real", "imag"),
    "polar": ("abs", "angle"),
    "heaviside": ("self", "values"),
}
"""Arguments that must have one floating-point type, by operator; in-place forms are served by the plain name."""

_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
"""Their weights may be float32 where the input has 16 bits."""

_LONG: dict[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "nll_loss_forward": ("target", (torch.int64, torch.uint8)),
    **dict.fromkeys(("nll_loss2d_forward", "multi_margin_loss"), ("target", (torch.int64,))),
    **dict.fromkeys(("index_copy", "index_fill", "put"), ("index", (torch.int64,))),
    **dict.fromkeys(("index_select", "index_add", "index_reduce"), ("index", (torch.int64, torch.int32))),
}
"""The argument of each operator that holds classes or positions, and the types it may have."""

_LINEAR_ALGEBRA = (
    "linalg_cholesky_ex cholesky cholesky_inverse cholesky_solve linalg_lu_factor_ex linalg_lu_solve linalg_qr "
    "_linalg_svd _linalg_eigh linalg_eig triangular_solve linalg_solve_triangular _linalg_solve_ex linalg_inv_ex "
    "_linalg_det _linalg_slogdet linalg_lstsq linalg_ldl_factor_ex linalg_householder_product ormqr"
).split()
_NOT_IN_16_BITS = frozenset((*_LINEAR_ALGEBRA, "_cdist_forward", "polar", "angle"))
"""Operators that have no kernel for float16 and bfloat16 on CUDA."""

_ORDERED = frozenset(("_foreach_clamp_min", "_foreach_clamp_max", "_foreach_minimum", "_foreach_maximum"))
"""Operators on lists that compare numbers, and have no kernel for complex ones (``clip_grad_value_``)."""

_FOURIER = ("_fft_c2c", "_fft_r2c", "_fft_c2r")
"""Transforms of which cuFFT computes those of 16 bits for powers of two only (ATen/native/cuda/CuFFTPlanCache.h)."""

_CHECKED = frozenset((*_ONE_TYPE, *_BATCH_NORMS, *_LONG, *_NOT_IN_16_BITS, *_ORDERED, *_FOURIER))
_16_BITS = (torch.float16, torch.bfloat16)


def check_types(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what a GPU would raise if the arguments of an operation have types that its CUDA kernel refuses.

    Args:
        name: The operator, such as ``aten::index_add_``.
        func: Its overload.
        args: Its positional arguments.
        kwargs: Its other arguments.

    Raises:
        RuntimeError: As PyTorch raises, in our words.
    """
    plain = name.removeprefix("aten::").removesuffix("_")
    if plain not in _CHECKED or func._overloadname.startswith("dtype"):  # products into another type
        return
    if plain in _ORDERED and any(each.is_meta and each.is_complex() for each in args[0]):
        raise RuntimeError(f"{plain} has no kernel for complex numbers")
    given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    if plain in _FOURIER:
        _check_fourier(plain, given["self"], given["dim"], given.get("last_dim_size"))
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.is_meta}
    _check_one_type(plain, {each: tensors[each] for each in _ONE_TYPE.get(plain, ()) if each in tensors})
    if plain in _BATCH_NORMS:
        _check_batch_norm(plain, tensors)
    if plain in _LONG:
        _check_positions(plain, tensors)
    if plain in _NOT_IN_16_BITS:
        low = next((each.dtype for each in tensors.values() if each.dtype in _16_BITS), None)
        if low is not None:
            raise RuntimeError(f"{plain} has no CUDA kernel for {_said(low)}: convert its input to float32")


def _check_one_type(plain: str, tensors: dict[str, torch.Tensor]) -> None:
    if len({each.dtype for each in tensors.values()}) > 1:
        found = " and ".join(f"{name} ({_said(each.dtype)})" for name, each in tensors.items())
        raise RuntimeError(f"{plain}: {found} must have the same type")


def _check_batch_norm(plain: str, tensors: dict[str, torch.Tensor]) -> None:
    if not {"input", "weight"} <= tensors.keys():  # there is none, or one is data of the host
        return
    input_, weight = tensors["input"].dtype, tensors["weight"]
    if weight.dtype == input_ or (input_ in _16_BITS and weight.dtype == torch.float32):
        return
    raise RuntimeError(f"{plain}: an input in {_said(input_)} cannot have a weight in {_said(weight.dtype)}")


def _check_positions(plain: str, tensors: dict[str, torch.Tensor]) -> None:
    argument, taken = _LONG[plain]
    if argument in tensors and tensors[argument].dtype not in taken:
        wanted = " or ".join(_said(each) for each in taken)
        raise RuntimeError(f"{plain}: {argument} must be of type {wanted}, found {_said(tensors[argument].dtype)}")


def _check_fourier(plain: str, data: torch.Tensor, dims: Sequence[int], last: int | None) -> None:
    """Check the sizes of a transform; ``last``: that of the last dimension of a result in real numbers."""
    if not data.is_meta or data.dtype not in (torch.float16, torch.complex32):
        return
    sizes = [data.shape[dim] for dim in dims]
    if last is not None and sizes:
        sizes[-1] = last
    if any(size & (size - 1) for size in sizes):
        raise RuntimeError(
            f"{plain}: cuFFT transforms float16 of sizes that are powers of two only, found "
            f"{', '.join(map(str, sizes))}: convert its input to float32"
        )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
