"""Executes operations on meta tensors, and explains why one cannot be executed without data.

Results of operators on meta tensors, remembered by the shapes of their arguments.

Most of PyTorch's meta kernels are written in Python and take 0.2 to 2 ms, several times as long as everything else that
a simulation does for an operation.  A training calls the same operators on the same shapes in every layer and step, so
the second call only makes empty tensors of the shapes, strides and types that the first one returned.  Every simulation
registers the same meta kernels (``meta_kernels``), so that what one remembers serves the next ones of the process, too.

Operators on lists (``_foreach``) run their kernel on one tensor of each kind only: a model has hundreds of parameters
of a dozen shapes.

Operations on tensors in host memory and in GPU memory at once: what PyTorch allows, and what it refuses.

A tensor in host memory that has data takes what computed tensors of the GPU are read as (``ScalarReads.host_values``):
validation loops collect their losses so.  From weights of the host, which have no data, it takes zeros.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from trainatomy.errors import SimulationError
from trainatomy.simulator.data_dependent import ScalarReads, assumed_values
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.storages import Storages
from trainatomy.simulator.values import Values

_SCALARS = frozenset((bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device))
_CHEAP = frozenset({"aten::_to_copy", "aten::clone", "aten::new_empty", "aten::zero_", "aten::fill_", "aten::copy_"})
"""Operators whose meta kernel is about as fast as looking a result up."""


_INTO_OUT = frozenset((torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out))
"""Products into a tensor of a type other than their operands', which PyTorch's meta kernels refuse."""


_MOST_REMEMBERED = 100_000
"""Results that are remembered at once, about 100 MB; a training of a large model has a few thousand."""


class _Like(NamedTuple):
    """An empty tensor to make: shape, strides in elements, dtype."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


_Remembered = _Like | None | tuple["_Remembered", ...]


class MetaResults:
    """Run operators on meta tensors; calls that are equal but for the identity of their tensors run once.

    Remembered are aten operators whose results are new dense tensors, and in-place forms that leave the shape, strides
    and type of their tensor as they are.  Views, and results whose shape depends on values, are not.
    """

    def __init__(self) -> None:
        self._results: dict[Any, _Remembered] = {}
        self._never: set[Any] = set()
        self._kinds: dict[int, str] = {}  # by identity, as hashing an operator is slow
        self._operators: list[Any] = []  # kept alive, so that no other operator gets the identity of one

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``, as the meta kernel would."""
        if func in _INTO_OUT:
            return kwargs["out"]
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _kind(func)
            self._operators.append(func)
        if kind == "list":
            return _on_list(func, args, kwargs)
        arguments = None if kind == "other" else _key((*args, *kwargs.items()) if kwargs else args)
        if arguments is None:
            return func(*args, **kwargs)
        key = (id(func), len(args), torch.get_default_dtype(), arguments)
        if key in self._results:
            return args[0] if kind == "in-place" else _make(self._results[key])
        if key in self._never:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if kind == "in-place":
            unchanged = result is args[0] and _key((*args, *kwargs.items()) if kwargs else args) == arguments
            self._results.update({key: None} if unchanged else {})
            self._never.update(() if unchanged else {key})
            return result
        if len(self._results) >= _MOST_REMEMBERED:
            self._results.clear()
        storages = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
        if _is_new(result, storages):
            self._results[key] = _description(result)
        else:
            self._never.add(key)
        return result


@cache
def results_of_process() -> MetaResults:
    """Return the results that all simulations of this process remember; one runs at a time."""
    return MetaResults()


@cache
def _kind(func: Any) -> Literal["functional", "in-place", "list", "other"]:
    """Return whether an operator returns new tensors only, or writes to its first argument only and returns it.

    ``list``: it does one of the two to each tensor of a list, independently of the others.
    """
    schema = func._schema
    if schema.name.startswith("aten::_foreach_"):
        return "list"
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    returned = [each.alias_info for each in schema.returns if str(each.type) == "Tensor"]
    if func.namespace != "aten" or schema.name in _CHEAP or any(tag in func.tags for tag in tags):
        return "other"
    if not returned or len(returned) < len(schema.returns):
        return "other"
    written = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    if not any(written) and all(alias is None for alias in returned):
        return "functional" if any("Tensor" in str(each.type) for each in schema.arguments) else "other"
    in_place = written[:1] == [True] and sum(written) == 1 and len(returned) == 1 and returned[0] is not None
    return "in-place" if in_place and returned[0].is_write else "other"


def _on_list(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists with the first item of each kind, and give the others results of the same layout.

    Items are of one kind if their tensors have the same shape, strides and type.
    """
    lists = {place for place, value in enumerate(args) if isinstance(value, (list, tuple))}
    named_list = any(isinstance(value, (list, tuple)) for value in kwargs.values())
    if named_list or len({len(args[place]) for place in lists}) != 1:
        return func(*args, **kwargs)
    first: dict[Any, int] = {}
    kinds = []
    for number, item in enumerate(zip(*(args[place] for place in sorted(lists)), strict=True)):
        kind = tuple(_key(part) if isinstance(part, torch.Tensor) else type(part) for part in item)
        if None in kind:
            return func(*args, **kwargs)
        kinds.append(kind)
        first.setdefault(kind, number)
    result = func(
        *([value[each] for each in first.values()] if place in lists else value for place, value in enumerate(args)),
        **kwargs,
    )
    if result is None:
        return None
    if not _is_new(result, {tensor.untyped_storage()._cdata for tensor in _tensors(args)}):
        return func(*args, **kwargs)
    made = dict(zip(first, result, strict=True))
    likes = {kind: _description(tensor) for kind, tensor in made.items()}
    return [made[kind] if first[kind] == number else _make(likes[kind]) for number, kind in enumerate(kinds)]


def _key(value: Any) -> Any:
    """Return a value as a part of a key: tensors by their metadata, numbers with their type; None if it has no key.

    The type matters: ``x * 2`` and ``x * 2.0`` have results of different types.
    """
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        if not value.is_meta or value.layout != torch.strided:
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        parts = []
        for item in value:
            part = _key(item)
            if part is None:
                return None
            parts.append(part)
        return type(value), tuple(parts)
    return (type(value), value) if type(value) in _SCALARS else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _is_new(result: Any, storages: set[int]) -> bool:
    """Return whether a result consists of meta tensors that fill storages of their own, none of ``storages``."""
    seen = set(storages)
    for tensor in _tensors(result):
        if not tensor.is_meta or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        dense = _make(_description(tensor)).untyped_storage().nbytes()
        if storage._cdata in seen or tensor.storage_offset() or storage.nbytes() != dense:
            return False
        seen.add(storage._cdata)
    return True


def _description(result: Any) -> _Remembered:
    if isinstance(result, torch.Tensor):
        return _Like(result.shape, result.stride(), result.dtype)
    return None if result is None else tuple(_description(item) for item in result)


def _make(remembered: _Remembered) -> Any:
    """Make the empty tensors of a remembered result."""
    if isinstance(remembered, _Like):
        return torch.empty_strided(remembered.shape, remembered.strides, dtype=remembered.dtype, device="meta")
    return None if remembered is None else tuple(_make(item) for item in remembered)


_NO_TYPE = re.compile(r"^\"\w+\" not implemented for '(\w+)'")
_NO_SPARSE = re.compile(r"^Could not run '([\w:.]+)' with arguments from the 'Sparse")
_MASKED_FILLS = frozenset({"aten::masked_fill", "aten::masked_fill_"})
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
        if name in _MASKED_FILLS and isinstance(args[2], torch.Tensor) and not args[2].is_meta:
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


_COPIES = {"aten::copy_": 1, "aten::_foreach_copy_": 1}
_FILLS = {
    f"aten::{name}{suffix}": place
    for name, place in (("fill", 1), ("masked_fill", 2), ("index_fill", 3), ("index_put", 2), ("_index_put_impl", 2))
    for suffix in ("", "_")
}
_WRITES = {**_COPIES, **_FILLS}
"""Position of the argument that is written to a tensor in host memory; fills take one number, by ``item()``.

Source: aten/src/ATen/native/Fill.cpp, TensorAdvancedIndexing.cpp (``_index_put_impl_``, ``masked_fill__cpu``), torch
2.9-2.13.
"""
_PICKS = frozenset(
    f"aten::{name}" for name in "index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put".split()
)
"""Operators whose indices may lie in host memory while the indexed tensor lies on the GPU, but not the reverse."""
_CROSSES = frozenset(
    f"aten::{name}"
    for name in (
        "copy copy_ _foreach_copy_ _to_copy _pack_padded_sequence _foreach_addcmul _foreach_addcmul_ _foreach_addcdiv "
        "_foreach_addcdiv_"
    ).split()
)
"""Operators that take tensors of several devices: lengths, and numbers of lists, lie in host memory."""


class Written(NamedTuple):
    """Result of an operation that wrote to host memory."""

    result: Any


class MixedDevices:
    """Runs or refuses operations that have a tensor with data, which lies in host memory.

    Args:
        storages: Location of meta tensors.
        reads: Answers where Python reads a value.

    Attributes:
        written: The operators that wrote computed values to host memory.
        checks_weights: Whether operations on tensors of the GPU and tensors without data of the host are refused, too.
    """

    def __init__(self, storages: Storages, reads: ScalarReads) -> None:
        self.written: set[str] = set()
        self.checks_weights = False
        self._storages = storages
        self._reads = reads

    def run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Written | None:
        """Return the result of an operation that writes computed values to host memory; None for any other.

        Raises:
            RuntimeError: PyTorch refuses these devices.
        """
        on_host = [value for value in args if isinstance(value, torch.Tensor) and not value.is_meta]
        place = _WRITES.get(name)
        if place is not None and all(not tensor.is_meta for tensor in _tensors_in(args[0])):
            others = args[1:place] + args[place + 1 :]
            source = args[place]
            crosses = any(map(self._is_on_gpu, _tensors_in(source)))
            if any(map(self._is_on_gpu, _tensors_in(others))) or (crosses and name in _FILLS and source.dim()):
                self._refuse()
            if not any(tensor.is_meta for tensor in _tensors_in(source)):
                return None
            return Written(func(*args[:place], self._read(name, source), *args[place + 1 :], **kwargs))
        if not name.startswith("aten::") or name in _CROSSES:
            return None
        if name in _PICKS:
            mixes = not args[0].is_meta or any(value.dim() for value in on_host)
        else:
            mixes = any(value.dim() for value in on_host)
        if mixes and any(map(self._is_on_gpu, _tensors_in(args))):
            self._refuse()
        return None

    def check(self, name: str, args: tuple[Any, ...]) -> None:
        """Refuse an operation on tensors of the GPU and tensors without data of the host, such as weights.

        To be called if it ``checks_weights``.

        Raises:
            RuntimeError: It is one.
        """
        if not self._storages.any_on_host():
            return
        if name in _CROSSES or name in _PICKS or not name.startswith("aten::"):
            return
        on_gpu = {self._storages.on_device(one) for one in _tensors_in(args) if one.is_meta and one.dim()}
        if len(on_gpu) > 1:
            self._refuse()

    def _read(self, name: str, value: Any) -> Any:
        """Return what Python reads of computed tensors."""
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                return value
            if not self._is_on_gpu(value):  # weights of the host, whose numbers nobody knows
                return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            found, is_known = self._reads.host_values(value)
            self.written |= set() if is_known else {name}
            return found
        return [self._read(name, item) for item in value]

    def _is_on_gpu(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and self._storages.on_device(tensor)

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"
        )


def has_host_tensor(args: tuple[Any, ...]) -> bool:
    """Return whether an argument, or the first item of a list, is a tensor with data."""
    for value in args:
        if type(value) is list and value:
            value = value[0]
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return True
    return False


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
