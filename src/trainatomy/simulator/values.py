"""Values of meta tensors that are known: those that came with the batch, and what follows from them.

Token ids, masks and labels come from the host with their values, positions from ``arange``.  Operations on such small
tensors run on the host as well, so that ``attention_mask.all()`` gets the answer of a run on a GPU.  Floating-point
values are known where they follow from integers, bools and constants alone: ``(1 - mask) * lowest``.  What follows from
images and sounds is computed only where it decides the size of a result: Idefics drops images that are black.

A router of a mixture of experts picks entries of computed scores (``topk``, ``max``, ``argmax``); here it picks each as
often as the others.  That is used only where it decides the size of a result, too, as where each expert selects its
tokens (``Values.deciding``).  So are random numbers that the GPU would draw evenly (``rand(...) < 0.15`` masks tokens):
others are drawn here, by a generator of the simulation's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch

from trainatomy.simulator.storages import storage_key

Origin = Literal["choice", "draw"]
CPU = torch.device("cpu")
_View = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
_MAX_KNOWN_ELEMENTS = 1 << 26
"""Elements of the largest tensor whose values are followed: four attention masks over 4096 tokens."""
_MAX_EAGER_ELEMENTS = 1 << 16
"""Elements of the largest tensor whose values are computed before anyone reads them; most masks are never read."""

_FACTORIES = frozenset({"aten::arange", "aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor"})
_SAME_SHAPE = frozenset({"aten::zeros_like", "aten::ones_like", "aten::full_like"})
LIKE_FACTORIES = frozenset({"aten::new_zeros", "aten::new_ones", "aten::new_full"}) | _SAME_SHAPE
"""Factories that use only the dtype of their tensor argument, some of them its shape too."""

_DRAWS = frozenset({"aten::rand", "aten::randint", "aten::randperm", "aten::rand_like", "aten::randint_like"})
"""Operators that draw what masks, labels and orders are made of."""

CHOOSES = frozenset({"aten::topk", "aten::max", "aten::min", "aten::argmax", "aten::argmin", "aten::multinomial"})
"""Operators that pick entries along a dimension; their last result says which."""


def _view_of(tensor: torch.Tensor) -> _View:
    """Return which view of its storage a tensor is; Python may see one as several objects (saved tensors)."""
    return int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


class _LazyValue:
    """Output of an operation on known values, computed on demand; its value is None where that fails.

    ``from_data`` is true of images, sounds and what is assumed, and of what follows from them; ``origins`` names what
    is assumed: "choice" of entries of unknown scores, "draw" of random numbers.
    """

    def __init__(
        self,
        run: Callable[[], list[torch.Tensor]],
        index: int,
        shape: torch.Size,
        *,
        from_data: bool = False,
        origins: frozenset[Origin] = frozenset(),
    ) -> None:
        self.from_data, self.origins = from_data, origins
        self._run: Callable[[], list[torch.Tensor]] | None = run
        self._index, self._shape = index, shape
        self._value: torch.Tensor | None = None

    def get(self) -> torch.Tensor | None:
        """Compute and return the value."""
        if self._run is not None:
            results, self._run = self._run(), None
            found = results[self._index] if self._index < len(results) else None
            self._value = found if found is not None and found.shape == self._shape and not found.is_meta else None
        return self._value


_VOCABULARY = 1000
"""Choices from which on they are taken for tokens."""


class Values:
    """Known values of meta tensors, as tensors on the host.

    Attributes:
        deciding: What was assumed, and decided something.
    """

    def __init__(self) -> None:
        self.deciding: set[Origin] = set()
        self._choices: set[int] = set()
        self._generator = torch.Generator(device="cpu").manual_seed(0)
        self._known: dict[int, dict[_View, torch.Tensor | _LazyValue]] = {}
        self._lazy: weakref.WeakSet[_LazyValue] = weakref.WeakSet()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the values of a tensor that came from the host, unless it is large.

        Floating-point values of several elements are data.
        """
        if value.is_meta or value.numel() > _MAX_KNOWN_ELEMENTS:
            return
        is_data = value.numel() > 1 and (value.is_floating_point() or value.is_complex())
        self._remember(tensor, _data(value) if is_data else value)

    def of(self, tensor: torch.Tensor, *, with_data: bool = False) -> torch.Tensor | None:
        """Return the values of a tensor, None if they are unknown; ``with_data``: also if they follow from data."""
        found = self._entry(tensor)
        if isinstance(found, _LazyValue):
            if found.from_data and not with_data:
                return None
            value = found.get()
            self.deciding |= found.origins if value is not None else frozenset()
            return value
        return found

    def choose(self, scores: torch.Tensor, dim: int, picked: torch.Tensor) -> None:
        """Assume which entries of unknown scores an operator picks along a dimension: each equally often.

        Of a vocabulary, the first ones are not picked first: they begin, end and pad texts.
        """
        if self._entry(scores) is not None or picked.numel() > _MAX_KNOWN_ELEMENTS:
            return
        self._choices.add(scores.shape[dim])

        def spread() -> list[torch.Tensor]:
            kept = picked_shape if len(picked_shape) == dims else [*picked_shape[:dim], 1, *picked_shape[dim:]]
            last = [size for position, size in enumerate(kept) if position != dim] + [kept[dim]]
            numbers = torch.arange(first, first + picked_shape.numel(), device="cpu")
            even = (numbers % choices).view(last).movedim(-1, dim)
            return [even.reshape(picked_shape)]

        dims, choices, picked_shape = scores.dim(), scores.shape[dim], picked.shape
        first = choices // 2 if choices >= _VOCABULARY else 0
        dim %= dims
        self._remember(picked, _LazyValue(spread, 0, picked_shape, from_data=True, origins=frozenset({"choice"})))

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget the values of a tensor, and of all views of its storage."""
        self._forget(storage_key(tensor))

    def is_uniform(self, tensor: torch.Tensor) -> bool:
        """Return whether all values of a tensor are known to be the same."""
        value = self.of(tensor)
        return value is not None and value.numel() > 0 and bool((value == value.flatten()[0]).all())

    def are_choices(self, tensor: torch.Tensor, rows: int) -> bool:
        """Return whether a tensor says which of as many rows were picked by unknown scores, in whatever order."""
        entry = self._entry(tensor)
        return isinstance(entry, _LazyValue) and "choice" in entry.origins and rows in self._choices

    def unknown(self, tensor: torch.Tensor) -> bool:
        """Return whether no value of the storage of a strided meta tensor is known."""
        return tensor.untyped_storage()._cdata not in self._known

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether the values of a tensor are known, or can be computed."""
        return self._entry(tensor) is not None

    def starts_unknown(self, args: tuple[Any, ...]) -> bool:
        """Return whether the first argument is a tensor of unknown values, so that the result is unknown as well."""
        first = args[0] if args else None
        return (
            isinstance(first, torch.Tensor) and first.is_meta and first.layout == torch.strided and self.unknown(first)
        )

    def _entry(self, tensor: torch.Tensor) -> torch.Tensor | _LazyValue | None:
        views = self._known.get(storage_key(tensor)) if self._known else None
        return views.get(_view_of(tensor)) if views else None

    def _remember(self, tensor: torch.Tensor, value: torch.Tensor | _LazyValue) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = {}

            def died(_: object, key: int = key) -> None:
                self._forget(key)

            self._storages[key] = weakref.ref(storage, died)
        self._known[key][_view_of(tensor)] = value

    def _forget(self, key: int) -> None:
        self._known.pop(key, None)
        self._storages.pop(key, None)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[torch.Tensor]) -> None:
        """Run an operation on the values of its arguments if all are known; else drop the values that it overwrote."""
        name = func._schema.name
        if name in _DRAWS:
            self._draw(func, args, kwargs, outputs[0])
            return
        if name in _SAME_SHAPE and self._entry(args[0]) is None:
            if outputs[0].is_floating_point() or not outputs[0].is_meta:
                return  # gradients and states, which nobody asks about
            args = (torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
        elif name in LIKE_FACTORIES and name not in _SAME_SHAPE:
            args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
        if name == "aten::copy_" and self._fills(*args[:2]):
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        tensors = [a for a in _flat(args) if a.is_meta]
        if tensors and self._entry(tensors[0]) is None and not func._schema.is_mutable:
            return
        if any(t.numel() > _MAX_KNOWN_ELEMENTS for t in outputs):
            return
        if not tensors and name not in _FACTORIES | LIKE_FACTORIES:
            return
        entries = [self._entry(t) for t in tensors]
        if any(entry is None for entry in entries):
            for tensor in (*outputs, *_written(func, args)):
                self.forget(tensor)
            return
        from_data = any(isinstance(entry, _LazyValue) and entry.from_data for entry in entries)
        origins = frozenset[Origin]().union(*(entry.origins for entry in entries if isinstance(entry, _LazyValue)))
        lazy = any(isinstance(entry, _LazyValue) for entry in entries)
        lazy = lazy or any(t.numel() > _MAX_EAGER_ELEMENTS for t in outputs)
        run = self._deferred(func, args, kwargs)
        if lazy and not func._schema.is_mutable:
            self._remember_lazily(run, outputs, from_data=from_data, origins=origins)
            return
        if func._schema.is_mutable:
            for pending in list(self._lazy):  # their arguments are about to change
                pending.get()
        for tensor, value in zip(outputs, run(), strict=False):
            if value.shape == tensor.shape and not value.is_meta:
                self._remember(tensor, _data(value, origins=origins) if from_data else value)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: torch.Tensor) -> None:
        """Remember numbers that stand for those which the GPU would draw."""
        if drawn.is_meta and drawn.numel() <= _MAX_KNOWN_ELEMENTS:
            like = [
                torch.empty(one.shape, dtype=one.dtype, device=CPU) if isinstance(one, torch.Tensor) else one
                for one in args
            ]
            changed = {"device": CPU, "pin_memory": False} | dict.fromkeys(kwargs.keys() & {"generator"})
            run = self._deferred(func, tuple(like), {**kwargs, **changed})
            origins = frozenset[Origin]({"draw"})
            self._remember(drawn, _LazyValue(run, 0, drawn.shape, from_data=True, origins=origins))

    def _fills(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Return whether a copy gives values to all of a tensor that had none: a buffer in host memory."""
        if not (target.is_meta and source.is_meta) or self._entry(source) is None or not self.unknown(target):
            return False
        return bool(target.nbytes == target.untyped_storage().nbytes())

    def _remember_lazily(
        self,
        run: Callable[[], list[torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        *,
        from_data: bool,
        origins: frozenset[Origin],
    ) -> None:
        once = cache(run)
        for index, tensor in enumerate(outputs):
            value = _LazyValue(once, index, tensor.shape, from_data=from_data, origins=origins)
            self._lazy.add(value)
            self._remember(tensor, value)

    def _deferred(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[torch.Tensor]]:
        """Return a function that runs the operation on today's values; no results where the host cannot run it."""
        host = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        values = self._entries(args)

        def run() -> list[torch.Tensor]:
            try:
                with self._own_numbers() if torch.Tag.nondeterministic_seeded in func.tags else nullcontext():
                    return _flat(func(*_computed(values), **{**kwargs, **host}))
            except (RuntimeError, NotImplementedError, TypeError):
                return []

        return run

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Draw from a generator of one's own: a GPU has one, too, and the host's decides something else."""
        host = torch.default_generator
        before = host.get_state()
        host.set_state(self._generator.get_state())
        try:
            yield
        finally:
            self._generator.set_state(host.get_state())
            host.set_state(before)

    def _entries(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._entry(value) if value.is_meta else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._entries(v) for v in value)
        return value


def _data(value: torch.Tensor, *, origins: frozenset[Origin] = frozenset()) -> _LazyValue:
    """Return values that count as data; ``origins``: what was assumed, from which they follow."""
    return _LazyValue(lambda: [value], 0, value.shape, from_data=True, origins=origins)


def _computed(value: Any) -> Any:
    """Replace lazy values in arguments by their results."""
    if isinstance(value, _LazyValue):
        return value.get()
    if isinstance(value, (list, tuple)):
        return type(value)(_computed(v) for v in value)
    return value


def _written(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the meta tensors that an operation overwrites."""
    if not func._schema.is_mutable:
        return []
    written = (
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [tensor for value in written for tensor in _flat(value) if tensor.is_meta]


def _flat(value: Any) -> list[torch.Tensor]:
    """Return all strided tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flat(v)]
    return []
