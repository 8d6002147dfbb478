"""Operations whose result depends on the values of a tensor that has none.

Values that follow from the batch are known (see ``values``).  Elsewhere a number is taken as 0 and a bool as True,
except what follows from ``isnan``, from ``isinf`` (counted, it is 0), from ``< 0`` or from the equality of whole
numbers, which is False: that is how a training without padding, overflow or NaN runs (``mask.all()``, ``found_inf``,
``isnan(loss)``, ``~isfinite(loss)``, ``(variance < 0).any()``), and a loop that ends when a token is the last one
(``token == eos``).  Sizes are known, also those that ranks send each other.  Whether a mask pads only at the end, so
that ``nn.TransformerEncoder`` may drop it in inference, is not checked: it is kept.

Operations whose result has a data-dependent size (``nonzero``, ``unique``, ``bincount``, ``repeat_interleave`` with
repeats, ``masked_select``, indexing with a bool mask) are executed if the values are known, or follow from an assumed
choice (``Values.choose``): each expert of a mixture gets equally many tokens.  Where they are not, as much is selected
as can be (``MaskBounds``) and all values differ, and the prediction says so (``DataDependentSizes.assumes``).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trainatomy.errors import SimulationError
from trainatomy.simulator.bounds import MaskBounds
from trainatomy.simulator.storages import forgetting
from trainatomy.simulator.values import Values

_COMPARISONS: dict[str, Callable[..., bool]] = {"aten::equal": torch.equal, "aten::allclose": torch.allclose}
_MAKES_FALSE = frozenset({"aten::isnan", "aten::isinf", "aten::isneginf", "aten::isposinf"})
_KEEPS_TRUE = frozenset({"aten::mul", "aten::all", "aten::logical_and", "aten::bitwise_and", "aten::__and__"})
_NEGATES = frozenset({"aten::bitwise_not", "aten::logical_not"})
_COUNTS = frozenset({"aten::sum", "aten::count_nonzero"})
_KEEPS_FALSE = frozenset(
    {
        "aten::any",
        "aten::_is_any_true",
        "aten::all",
        "aten::logical_or",
        "aten::logical_or_",
        "aten::bitwise_or",
        "aten::bitwise_or_",
        "aten::__or__",
        "aten::__ior__",
        "aten::logical_and",
        "aten::to",
        "aten::_to_copy",
    }
)
_EQUALITIES = frozenset({"aten::eq", "aten::isin"})
_JOINS_IN_PLACE = frozenset({"aten::logical_or_", "aten::bitwise_or_", "aten::__ior__"})
_OVERWRITES = frozenset(
    {"aten::copy_", "aten::fill_", "aten::index_put_", "aten::_index_put_impl_", "aten::masked_fill_"}
)
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
_SIZED_BY_VALUES = frozenset(
    {"aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount", "aten::repeat_interleave"}
)
_COUNTS_DISTINCT = frozenset({"aten::_unique2", "aten::unique_consecutive", "aten::unique_dim"})
READS = frozenset(
    {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::_nested_tensor_from_mask_left_aligned", *_COMPARISONS}
)
"""Operators that ``ScalarReads.answer`` may answer."""
_COMPARES = frozenset({"aten::lt", "aten::le", "aten::gt", "aten::ne"})
LEARNS = _MAKES_FALSE | _KEEPS_FALSE | _KEEPS_TRUE | _NEGATES | _COUNTS | _OVERWRITES | _EQUALITIES | _COMPARES
"""Operators that ``ScalarReads.learn`` may learn from."""
SIZED = _INDEXING | _SIZED_BY_VALUES | {"aten::nonzero", "aten::masked_select"}
"""Operators that ``DataDependentSizes.run`` may run."""
_OF_LIMITS = frozenset({"aten::eq", "aten::gt", "aten::le"})
_MASK_DTYPES = (torch.bool, torch.uint8)

_MOST_FALSE = 4096
"""Elements of a mask whose known values are looked through."""
MAX_UNKNOWN_BOOLS = 10_000
"""Unknown bools that a run may ask for before it counts as an endless loop; a training asks for a few in each step."""


def dimension_of_choice(name: str, args: tuple[Any, ...]) -> int | None:
    """Return along which dimension an operator picks entries; None if it picks one of all."""
    if name == "aten::multinomial":
        return args[0].dim() - 1
    position = 2 if name == "aten::topk" else 1
    dim = args[position] if len(args) > position else -1 if name == "aten::topk" else None
    return dim if isinstance(dim, int) and args[0].dim() else None


def assumed_values(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Return the values that a computed tensor is assumed to have on the host: zeros, expanded from one element.

    None for integers and bools, which say how large something is, or how often something runs.
    """
    if not tensor.is_floating_point():
        return None
    return torch.zeros((), dtype=dtype or tensor.dtype, device="cpu").expand(tensor.shape)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has whole numbers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


class _KnownFalse(NamedTuple):
    """A storage whose bools are all False, and whether that is because unknown whole numbers are taken to differ."""

    storage: weakref.ref[torch.UntypedStorage]
    numbers_differ: bool


def _is_beyond_limits(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operation asks for numbers that are infinite, or beyond the limits of their dtype."""
    if not (name in _OF_LIMITS and isinstance(args[1], float) and args[0].is_floating_point()):
        return False
    limit = torch.finfo(args[0].dtype).max
    if name == "aten::eq":
        return math.isinf(args[1])
    return args[1] >= limit if name == "aten::gt" else args[1] <= -limit


class ScalarReads:
    """Results of operations that read a value of a meta tensor into Python.

    Attributes:
        numbers_differ: True once Python read that unknown whole numbers differ.
    """

    def __init__(self, values: Values) -> None:
        self.numbers_differ = False
        self._values = values
        self._unknown_bools = 0
        self._true_left: int | None = None
        self._false: dict[int, _KnownFalse] = {}
        self._finite: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # bools that say that numbers are finite

    def answer(self, name: str, args: tuple[Any, ...]) -> bool | int | float | None:
        """Return the result of an operation that reads a value; None if the operation should run."""
        if name == "aten::_local_scalar_dense" or name == "aten::is_nonzero":
            return self._scalar(args[0]) if args[0].is_meta else None
        if name == "aten::_nested_tensor_from_mask_left_aligned":
            return False
        if name in _COMPARISONS and (args[0].is_meta or args[1].is_meta):
            known = [self._values.of(t) if t.is_meta else t for t in args[:2]]
            is_known = known[0] is not None and known[1] is not None
            return _COMPARISONS[name](*known, *args[2:]) if is_known else self._next_true()
        return None

    def host_values(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return what Python reads of each number of a tensor, and whether that is known."""
        known = self._values.of(tensor, with_data=not tensor.is_floating_point())
        if known is not None:
            return known, True
        value = not self._is_false(tensor) if tensor.dtype == torch.bool else 0
        return torch.full((), value, dtype=tensor.dtype, device="cpu").expand(tensor.shape), False

    def learn(self, name: str, args: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """Remember the outputs of an operation that are known to be False."""
        if (self._false or self._finite) and name in _OVERWRITES:
            self._false.pop(args[0].untyped_storage()._cdata, None)
            self._finite.pop(args[0].untyped_storage()._cdata, None)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        stays_false = bool(self._false) and name in _KEEPS_FALSE and all(self._is_false(t) for t in tensors)
        if self._false and name in _JOINS_IN_PLACE and not stays_false:
            self._false.pop(args[0].untyped_storage()._cdata, None)
        counts = bool(self._false) and name in _COUNTS and all(self._is_false(t) for t in tensors)
        if counts and not any(map(self._follows_from_numbers, tensors)):
            self._values.learn(outputs[0], torch.zeros(outputs[0].shape, dtype=outputs[0].dtype))
        below_zero = name == "aten::lt" and isinstance(args[1], (int, float)) and args[1] <= 0
        is_finite = self._says_finite(name, args, tensors)
        for tensor in outputs if is_finite else ():
            storage = tensor.untyped_storage()
            self._finite[storage._cdata] = weakref.ref(storage, forgetting(self._finite, storage._cdata))
        beyond_limits = _is_beyond_limits(name, args) or (name in _NEGATES and self._is_finite(tensors[0]))
        differ = name in _EQUALITIES and self._are_unknown_numbers(tensors)
        with_itself = name == "aten::ne" and args[0] is args[1]  # how autograd's anomaly mode looks for NaN
        if name in _MAKES_FALSE or stays_false or below_zero or beyond_limits or differ or with_itself:
            differ = differ or (stays_false and any(map(self._follows_from_numbers, tensors)))
            for tensor in outputs:
                storage = tensor.untyped_storage()
                key = storage._cdata
                self._false[key] = _KnownFalse(weakref.ref(storage, forgetting(self._false, key)), differ)

    def _says_finite(self, name: str, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether an operation is a part of ``torch.isfinite``, or joins what says that numbers are finite."""
        if name == "aten::eq" and args[0] is args[1]:
            return True
        if name == "aten::ne" and isinstance(args[1], float) and math.isinf(args[1]):
            return True
        return bool(self._finite) and name in _KEEPS_TRUE and all(map(self._is_finite, tensors))

    def _is_finite(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._finite

    def _are_unknown_numbers(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors have whole numbers, and those of one are unknown."""
        return all(map(_is_whole, tensors)) and any(
            t.is_meta and not self._values.knows(t, with_data=False) for t in tensors
        )

    @contextlib.contextmanager
    def true_at_most(self, times: int) -> Iterator[None]:
        """Answer unknown bools with True that many times in the block, then with False: a loop that ends by chance."""
        before, self._true_left = self._true_left, times
        try:
            yield
        finally:
            self._true_left = before

    def _is_false(self, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage()._cdata in self._false:
            return True
        known = self._values.of(tensor) if tensor.is_meta and tensor.numel() <= _MOST_FALSE else None
        return known is not None and not known.any()

    def _follows_from_numbers(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is False because unknown whole numbers are taken to differ."""
        known = self._false.get(tensor.untyped_storage()._cdata)
        return known is not None and known.numbers_differ

    def _scalar(self, tensor: torch.Tensor) -> bool | int | float:
        known = self._values.answer(tensor)
        if known is not None:
            return known.item()
        if tensor.dtype == torch.bool:
            return self._bool(tensor)
        return 0.0 if tensor.is_floating_point() else 0

    def _next_true(self) -> bool:
        """Return True, or False when no more are left to be answered with True."""
        if self._true_left is None:
            return True
        self._true_left -= 1
        return self._true_left >= 0

    def _bool(self, tensor: torch.Tensor) -> bool:
        if self._true_left is not None:
            return self._next_true()
        self._unknown_bools += 1
        if self._unknown_bools > MAX_UNKNOWN_BOOLS:
            raise SimulationError(
                f"the run read a computed bool {MAX_UNKNOWN_BOOLS:,} times, whose value does not exist without a GPU: "
                "a loop that ends when a computed value is small enough does not end here.\n"
                "Measure this model with `trainatomy measure`, or give the loop a fixed length"
            )
        is_false = self._is_false(tensor)
        self.numbers_differ |= is_false and self._follows_from_numbers(tensor)
        return not is_false


class DataDependentSizes:
    """Executes operations whose output size depends on values, where the values are known.

    CUDA turns a bool mask into indices before it indexes, and so does this class.
    Source: aten/src/ATen/native/IndexingUtils.h (``expandTensors``), torch 2.9-2.13.

    Args:
        values: Known values.

    Attributes:
        selected: Number of true elements of each mask of the last operation.
        bounds: How many elements of unknown masks are true at most.
        assumes: Called with the operation where values are unknown, before the largest result is assumed: everything
            is selected, all values differ.  None refuses such an operation.
    """

    def __init__(self, values: Values) -> None:
        self.selected: tuple[int, ...] = ()
        self.assumes: Callable[[str], object] | None = None
        self.bounds = MaskBounds(values)
        self._values = values

    def run(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result; None if the operation is none of these, on the CPU, or the values are unknown."""
        self.selected = ()
        if isinstance(args[0], torch.Tensor) and not args[0].is_meta:
            return None
        if name == "aten::nonzero":
            return self._nonzero(name, args[0])
        if name == "aten::masked_select":
            shape = torch.broadcast_shapes(args[1].shape, args[0].shape)
            mask = self._values.of(args[1], with_data=True)
            if mask is None and self.assumes is None:
                return None
            if mask is None and self.assumes is not None:
                self.assumes(name)
            repeats = shape.numel() // max(1, args[1].numel())
            count = self.bounds.most(args[1]) * repeats if mask is None else int(mask.expand(shape).sum())
            self.selected = (count,)
            return torch.empty(count, dtype=args[0].dtype, device="meta")
        if name in _SIZED_BY_VALUES:
            return self._run_on_values(func, args, kwargs)
        if name in _INDEXING and any(isinstance(i, torch.Tensor) and i.dtype in _MASK_DTYPES for i in args[1]):
            indices = self._masks_as_indices(name, args[1])
            return None if indices is None else func(args[0], indices, *args[2:], **kwargs)
        return None

    def _nonzero(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        value = self._values.of(tensor, with_data=True) if tensor.is_meta else tensor
        if value is None:
            if self.assumes is None:
                return None
            self.assumes(name)
            return torch.empty((self.bounds.most(tensor), tensor.dim()), dtype=torch.long, device="meta")
        positions = value.nonzero()
        found = torch.empty(positions.shape, dtype=torch.long, device="meta")
        self._values.learn(found, positions)
        return found

    def _run_on_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self._values.of(args[0], with_data=True) if args[0].is_meta else None
        if value is None and self.assumes is not None and func._schema.name in _COUNTS_DISTINCT:
            self.assumes(func._schema.name)
            value = torch.arange(args[0].numel(), device="cpu").to(args[0].dtype).view(args[0].shape)
        if value is None:
            return None
        known = func(value, *args[1:], **kwargs)
        several = known if isinstance(known, tuple) else (known,)
        found = tuple(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in several)
        for tensor, each in zip(found, several, strict=True):
            self._values.learn(tensor, each)
        return found if isinstance(known, tuple) else found[0]

    def _masks_as_indices(self, name: str, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Replace each mask by one index for each of its dimensions; None if a mask is unknown."""
        expanded: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in _MASK_DTYPES:
                expanded.append(index)
                continue
            positions = self._nonzero(name, index)
            if positions is None:
                return None
            self.selected += (positions.shape[0],)
            expanded.extend(positions.unbind(1))
        return expanded
