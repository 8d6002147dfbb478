"""Calls of operators: a cheap key by which equal calls are found, and the ``Call`` value made from it.

Types of arguments that CUDA's kernels refuse, although PyTorch's meta kernels take them.

A float32 batch for a model in bfloat16, labels of 32 bits, or ``index_add`` of what autocast made: each is an error on
a GPU.  Found by calling the samples of PyTorch's own operator tests (``torch.testing._internal``, 2.13) with one
argument of another type, and checked in the source of the CUDA kernels (aten/src/ATen/native, ``cuda/``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from trainatomy.errors import SimulationError
from trainatomy.results.operations import Array, Call
from trainatomy.simulator.storages import NESTED, Storages

_COPIES_TO_RESULT = frozenset({"fsdp::all_gather_copy_in"})
"""Operators that copy their list into a part of another argument, their first result, and do not declare it."""


class TensorKey(tuple[Any, ...]):
    """Tensor in a call's key: shape, strides, dtype, number of the storage, on host or not, number of the part."""

    __slots__ = ()


class StorageNumbers:
    """Numbers of the storages of one call, by their keys, and of the places in them where its tensors begin."""

    __slots__ = ("_location", "parts", "storages")

    def __init__(self, location: Storages) -> None:
        """Take the location of all tensors."""
        self.storages: dict[int, int] = {}
        self.parts: dict[tuple[int, int], int] = {}
        self._location = location

    def key(self, value: Any) -> Any:
        """Return a value as part of a call's key: tensors as ``TensorKey``, lists as tuples.

        A sparse tensor counts as its values.
        """
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise SimulationError(NESTED)
            value = value._values() if value.layout == torch.sparse_coo else value
            storage = value.untyped_storage()._cdata
            number = self.storages.setdefault(storage, len(self.storages))
            part = self.parts.setdefault((storage, int(value.storage_offset())), len(self.parts))
            on_host = self._location.is_host_key(storage) if value.is_meta else True
            return TensorKey((value.shape, value.stride(), value.dtype, number, on_host, part))
        if isinstance(value, (list, tuple)):
            return tuple([self.key(item) for item in value])
        return None if isinstance(value, torch.Generator) else value


def storages_in(key: Any) -> list[int]:
    """Return the storage numbers of all tensors in a key."""
    if type(key) is TensorKey:
        return [key[3]]
    return [number for item in key for number in storages_in(item)] if type(key) is tuple else []


def arrays(key: Any) -> tuple[Array, ...]:
    """Return the tensors of a key, flattened."""
    if type(key) is TensorKey:
        shape, strides, dtype, storage, on_host, part = key
        return (Array(tuple(shape), tuple(strides), text(dtype), dtype.itemsize, storage, on_host, part),)
    return tuple(array for item in key for array in arrays(item)) if type(key) is tuple else ()


def text(value: Any) -> str:
    """Return an argument as text, with the device of the simulated GPU; of a storage on the host without its bytes."""
    if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
        return f"...\n[{torch.typename(value)}(device={value.device}) of size {len(value)}]"
    return str(value).removeprefix("torch.").replace("meta", "cuda")


def call_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    keys: tuple[Any, Any, Any],
    in_place: bool,
    no_new_storage: bool,
) -> Call:
    """Return a call as a value; runs once for each distinct call.

    Args:
        func: Operator overload.
        args: Positional arguments.
        kwargs: Keyword arguments.
        result: Its result.
        keys: Keys of positional arguments, keyword arguments and result.
        in_place: True if a GPU writes the result into the first argument.
        no_new_storage: True if the result shares its storages with the arguments.
    """
    schema = func._schema
    inputs, lengths, numbers, written = _arguments(schema, keys)
    outputs = arrays(keys[2])
    name = schema.name
    if name in _COPIES_TO_RESULT:
        inputs, outputs, no_new_storage = inputs[: lengths[0]], outputs[:1], False
    if in_place:
        outputs = tuple(array._replace(storage=inputs[0].storage, part=inputs[0].part) for array in outputs)
        written, name = [0], _in_place_name(name)
    return Call(
        name,
        tuple(inputs),
        outputs,
        tuple(lengths),
        tuple(numbers),
        _flop(func, args, kwargs, result),
        tuple(written),
        is_view=bool(outputs) and no_new_storage and not written,
        pointwise=torch.Tag.pointwise in func.tags,
    )


def _arguments(
    schema: Any, keys: tuple[Any, Any, Any]
) -> tuple[list[Array], list[int], list[tuple[str, str]], list[int]]:
    """Return flattened tensors, lengths of lists, other arguments as text, and positions that are written to."""
    inputs: list[Array] = []
    lengths: list[int] = []
    numbers: list[tuple[str, str]] = []
    written: list[int] = []
    by_name = dict(keys[1])
    for position, argument in enumerate(schema.arguments):
        value = keys[0][position] if position < len(keys[0]) else by_name.get(argument.name)
        tensors = arrays(value)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(range(len(inputs), len(inputs) + len(tensors)))
        inputs.extend(tensors)
        if type(value) is tuple and (tensors or "Tensor" in str(argument.type)):
            lengths.append(len(tensors))
            if len(tensors) < len(value):  # indices: shows which dimensions are indexed
                numbers.append((argument.name, ", ".join("*" if type(item) is TensorKey else "None" for item in value)))
        elif value is not None and not tensors:
            numbers.append((argument.name, text(list(value) if type(value) is tuple else value)))
    return inputs, lengths, numbers, written


def _in_place_name(name: str) -> str:
    """Return the name of an operator's in-place variant, where it has one."""
    space, _, operator = name.partition("::")
    return f"{name}_" if hasattr(getattr(torch.ops, space), f"{operator}_") else name


def _flop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the floating-point operations by torch's registry, called as ``FlopCounterMode`` does.

    None where it has no formula, or one that does not take these arguments: ``addmm`` with an ``out_dtype`` raises
    TypeError (torch/utils/flop_counter.py).
    """
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return None
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except (AssertionError, TypeError):
        return None


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


def has_types(func: Any) -> bool:
    """Return whether an operator's CUDA kernel takes some types only (see ``check_types``)."""
    return _plain(func._schema.name) in _CHECKED and not func._overloadname.startswith("dtype")  # into another type


def _plain(name: str) -> str:
    return name.removeprefix("aten::").removesuffix("_")


def check_types(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what a GPU would raise if the arguments of an operation have types that its CUDA kernel refuses.

    Args:
        name: The operator, such as ``aten::index_add_``; one that ``has_types``.
        func: Its overload.
        args: Its positional arguments.
        kwargs: Its other arguments.

    Raises:
        RuntimeError: As PyTorch raises, in our words.
    """
    plain = _plain(name)
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
