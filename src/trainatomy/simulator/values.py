"""Values of meta tensors that are known: those that came with the batch, and what follows from them.

Token ids, masks and labels come from the host with their values, positions from ``arange``.  Operations on such small
tensors run on the host as well, so that ``attention_mask.all()`` gets the answer of a run on a GPU.  Floating-point
values are known where they follow from integers, bools and constants alone: ``(1 - mask) * lowest``.  What follows from
images and sounds is computed only where it decides the size of a result: Idefics drops images that are black.

A router of a mixture of experts picks entries of computed scores (``topk``, ``max``, ``argmax``); here it picks each as
often as the others.  That is used only where it decides the size of a result, too, as where each expert selects its
tokens (``Values.deciding``).  So are evenly spread numbers that the GPU would draw (``rand(...) < 0.15`` masks tokens):
others are drawn here, by a generator of the simulation's own.  Whole numbers that are drawn so are known like those of
the batch: most synthetic benchmarks draw their token ids on the GPU.

Values that are computed when someone asks for them, and what operations read and write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.simulator.storages import storage_key

Origin = Literal["choice", "draw", "rounded", "bounded"]
_GUESSES = frozenset[Origin](("rounded", "bounded"))


class UnknownValue(Exception):
    """A value that an operation needs, and that could not be computed."""


class LazyValue:
    """Output of an operation on known values, computed on demand; its value is None where that fails.

    Values that follow from each other are computed in the order in which they were made, so that a chain of them may be
    long: each token of a generation follows from the one before.

    Args:
        run: Computes the outputs of the operation.
        index: Which of its outputs this is.
        shape: The shape of this output.
        needs: Values that the operation reads.
        from_data: True for images, sounds, choices and random fractions, and for what follows from them.
        origins: What is assumed: "choice" of entries of unknown scores, "draw" of random numbers; what is "rounded"
            to whole numbers, or kept within bounds ("bounded"), was 0 before.

    Attributes:
        shape: See above.
        number: Its place in the order in which values were made.
    """

    _made = count()

    def __init__(
        self,
        run: Callable[[], list[torch.Tensor]],
        index: int,
        shape: torch.Size,
        *,
        needs: Sequence[LazyValue] = (),
        from_data: bool = False,
        origins: frozenset[Origin] = frozenset(),
    ) -> None:
        self.from_data, self.origins = from_data, origins
        self._run: Callable[[], list[torch.Tensor]] | None = run
        self._index, self.shape, self._needs = index, shape, needs
        self.number = next(self._made)
        self._value: torch.Tensor | None = None

    @property
    def is_guess(self) -> bool:
        """Whether the value says nothing but what agrees with a number that Python reads as 0."""
        return bool(self.origins & _GUESSES)

    def get(self) -> torch.Tensor | None:
        """Compute and return the value."""
        if self._run is not None:
            pending, waiting = dict[int, LazyValue](), [self]
            while waiting:
                value = waiting.pop()
                if value._run is not None and value.number not in pending:
                    pending[value.number] = value
                    waiting += value._needs
            for number in sorted(pending):
                pending[number]._compute()
        return self._value

    def _compute(self) -> None:
        assert self._run is not None
        results, self._run, self._needs = self._run(), None, ()
        found = results[self._index] if self._index < len(results) else None
        self._value = found if found is not None and found.shape == self.shape and not found.is_meta else None


def assumed(value: torch.Tensor, origins: frozenset[Origin] = frozenset(), *, from_data: bool = True) -> LazyValue:
    """Return values that count as data or follow from what was assumed."""
    return LazyValue(lambda: [value], 0, value.shape, from_data=from_data, origins=origins)


def computed(value: Any) -> Any:
    """Replace lazy values in arguments by their results.

    Raises:
        UnknownValue: One of them could not be computed.
    """
    if isinstance(value, LazyValue):
        if (result := value.get()) is None:
            raise UnknownValue
        return result
    if isinstance(value, (list, tuple)):
        return type(value)(computed(v) for v in value)
    return value


def written(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the meta tensors that an operation overwrites."""
    if not func._schema.is_mutable:
        return []
    overwritten = (
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [tensor for value in overwritten for tensor in flat(value) if tensor.is_meta]


def flat(value: Any) -> list[torch.Tensor]:
    """Return all strided tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in flat(v)]
    return []


CPU = torch.device("cpu")
_View = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
_MAX_KNOWN_ELEMENTS = 1 << 26
"""Elements of the largest tensor whose values are followed: four attention masks over 4096 tokens."""
_MAX_EAGER_ELEMENTS = 1 << 16
"""Elements of the largest tensor whose values are computed before anyone reads them; most masks are never read."""

_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "arange", "eye", "full", "linspace", "logspace", "ones", "range", "scalar_tensor", "tril_indices",
        "triu_indices", "zeros",
    )
)  # fmt: skip
"""Factories whose values follow from numbers alone."""

_SAME_SHAPE = frozenset({"aten::zeros_like", "aten::ones_like", "aten::full_like"})
LIKE_FACTORIES = frozenset({"aten::new_zeros", "aten::new_ones", "aten::new_full"}) | _SAME_SHAPE
"""Factories that use only the dtype of their tensor argument, some of them its shape too, but none of its values."""

_FILLS = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
"""Operators that overwrite all of their first argument."""

_DRAWS = frozenset(
    f"aten::{name}" for name in ("rand", "randint", "randperm", "rand_like", "randint_like", "random_", "bernoulli_")
)
"""Operators that draw what masks, labels and orders are made of."""

CHOOSES = frozenset({"aten::topk", "aten::max", "aten::min", "aten::argmax", "aten::argmin", "aten::multinomial"})
"""Operators that pick entries along a dimension; their last result says which."""


BOUNDS = frozenset({"aten::clamp", "aten::clamp_min", "aten::clamp_max"})
"""Operators that keep numbers within bounds."""
GUESSES = BOUNDS | {"aten::_to_copy"}
"""Operators after which ``Values.guess`` may know numbers."""
_MOST_GUESSED = 1024
"""Numbers of a tensor such as the boxes of an image."""


def _view_of(tensor: torch.Tensor) -> _View:
    """Return which view of its storage a tensor is; Python may see one as several objects (saved tensors)."""
    return int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


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
        self._known: dict[int, dict[_View, torch.Tensor | LazyValue]] = {}
        self._pending: weakref.WeakValueDictionary[int, LazyValue] = weakref.WeakValueDictionary()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the values of a tensor that came from the host, as they are now, unless it is large.

        Floating-point values of several elements are data.
        """
        if value.is_meta or value.numel() > _MAX_KNOWN_ELEMENTS:
            return
        is_data = value.numel() > 1 and (value.is_floating_point() or value.is_complex())
        with _disable_current_modes():  # a call of ours takes no time
            value = value.detach().clone()  # the host may write to its tensor, or give it other data
        self.remember(tensor, assumed(value) if is_data else value)

    def of(self, tensor: torch.Tensor, *, with_data: bool = False, decides: bool = True) -> torch.Tensor | None:
        """Return the values of a tensor, None if they are unknown.

        Args:
            tensor: A meta tensor.
            with_data: Whether values count that follow from data.
            decides: Whether what the values say decides something that a reader should know of.
        """
        found = self.entry(tensor)
        if isinstance(found, LazyValue):
            if found.is_guess or (found.from_data and not with_data):
                return None
            value = found.get()
            self.deciding |= found.origins if decides and value is not None else frozenset()
            return value
        return found

    def answer(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what Python reads of one number or bool, None if it is unknown.

        A fraction does not follow from data, and a bool neither from a choice nor from a guess about fractions.
        """
        entry = self.entry(tensor)
        if not isinstance(entry, LazyValue):
            return entry
        if tensor.dtype == torch.bool and entry.origins & {"choice", "bounded"}:
            return None
        if not entry.is_guess:
            return self.of(tensor, with_data=not tensor.is_floating_point())
        guess = entry.get()
        return guess if guess is not None and guess.isfinite().all() else None

    def guess(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        """Let a few unknown fractions have been 0 where they are rounded to whole numbers or kept within bounds.

        Python code that cuts out boxes and resizes them reads several numbers that must agree with each other.
        """
        if result.numel() > _MOST_GUESSED or not args[0].is_floating_point() or self.entry(args[0]) is not None:
            return
        origin: Origin = "bounded" if result.is_floating_point() else "rounded"
        if origin == "rounded" or func._schema.name in BOUNDS:
            zeros = torch.zeros((), dtype=args[0].dtype, device=CPU).expand(args[0].shape)
            run = self._deferred(func, (zeros, *args[1:]), kwargs)
            self.remember(result, LazyValue(run, 0, result.shape, from_data=True, origins=frozenset({origin})))

    def choose(self, scores: torch.Tensor, dim: int, picked: torch.Tensor) -> None:
        """Assume which entries of unknown scores an operator picks along a dimension: each equally often.

        Of a vocabulary, the first ones are not picked first: they begin, end and pad texts.
        """
        entry = self.entry(scores)
        if (
            entry is not None and not (isinstance(entry, LazyValue) and entry.is_guess)
        ) or picked.numel() > _MAX_KNOWN_ELEMENTS:
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
        self.remember(picked, LazyValue(spread, 0, picked_shape, from_data=True, origins=frozenset({"choice"})))

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget the values of a tensor, and of all views of its storage."""
        self._forget(storage_key(tensor))

    def is_uniform(self, tensor: torch.Tensor) -> bool:
        """Return whether all values of a tensor are known to be the same."""
        value = self.of(tensor, decides=False)
        return value is not None and value.numel() > 0 and bool((value == value.flatten()[0]).all())

    def are_choices(self, tensor: torch.Tensor, rows: int) -> bool:
        """Return whether a tensor says which of as many rows were picked by unknown scores, in whatever order."""
        entry = self.entry(tensor)
        return isinstance(entry, LazyValue) and "choice" in entry.origins and rows in self._choices

    def unknown(self, tensor: torch.Tensor) -> bool:
        """Return whether no value of the storage of a strided meta tensor is known."""
        return tensor.untyped_storage()._cdata not in self._known

    def knows(self, tensor: torch.Tensor, *, with_data: bool = True) -> bool:
        """Return whether values are known or can be computed; ``with_data``: also if they follow from data."""
        entry = self.entry(tensor)
        return entry is not None and (with_data or not (isinstance(entry, LazyValue) and entry.from_data))

    def starts_unknown(self, args: tuple[Any, ...]) -> bool:
        """Return whether the first argument is a tensor of unknown values, so that the result is unknown as well."""
        first = args[0] if args else None
        return (
            isinstance(first, torch.Tensor) and first.is_meta and first.layout == torch.strided and self.unknown(first)
        )

    def entry(self, tensor: torch.Tensor) -> torch.Tensor | LazyValue | None:
        """Return the values of a tensor, or how they can be computed; None if they are unknown."""
        views = self._known.get(storage_key(tensor)) if self._known else None
        return views.get(_view_of(tensor)) if views else None

    def remember(self, tensor: torch.Tensor, value: torch.Tensor | LazyValue) -> None:
        """Remember values, or how they can be computed, as those of a tensor."""
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
        if name in LIKE_FACTORIES or (name in _FILLS and self._starts_anew(*args[:2])):
            if _is_state(name, outputs[0]):
                return
            args = (torch.empty((), dtype=args[0].dtype, device=CPU).expand(args[0].shape), *args[1:])
            if name in _FILLS:
                args = (args[0].contiguous(), *args[1:])
        tensors = [a for a in flat(args) if a.is_meta]
        if tensors and self.entry(tensors[0]) is None and not func._schema.is_mutable:
            return
        if any(t.numel() > _MAX_KNOWN_ELEMENTS for t in outputs):
            self._forget_all(written(func, args))
            return
        if not tensors and name not in _FACTORIES | LIKE_FACTORIES | _FILLS:
            if name == "aten::_to_copy" and outputs and outputs[0].is_meta:
                self.learn(outputs[0], args[0].to(outputs[0].dtype))
            return
        entries = [self.entry(t) for t in tensors]
        if any(entry is None for entry in entries):
            self._forget_all((*outputs, *written(func, args)))
            return
        lazies = [entry for entry in entries if isinstance(entry, LazyValue)]
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        from_data = any(entry.from_data for entry in lazies) or (is_draw and outputs[0].is_floating_point())
        origins = frozenset[Origin]({"draw"} if is_draw else ()).union(*(entry.origins for entry in lazies))
        run = self._deferred(func, args, kwargs)
        is_large = any(t.numel() > _MAX_EAGER_ELEMENTS for t in outputs)
        if (lazies or is_large) and not func._schema.is_mutable:
            self._remember_lazily(run, outputs, needs=lazies, from_data=from_data, origins=origins)
            return
        if func._schema.is_mutable:
            self._compute_pending()
        for tensor, value in zip(outputs, run(), strict=False):
            if value.shape == tensor.shape and not value.is_meta:
                self.remember(tensor, assumed(value, origins, from_data=from_data) if from_data or origins else value)

    def follow_function(
        self, function: Callable[..., torch.Tensor], arguments: Sequence[Any], result: torch.Tensor
    ) -> None:
        """Let a tensor have what a function returns of the values of meta tensors and of numbers, if all are known.

        Numbers that the function draws are not known.
        """
        entries = self._entries(list(arguments))
        if any(entry is None for entry in entries) or result.numel() > _MAX_KNOWN_ELEMENTS:
            return
        lazies = [entry for entry in entries if isinstance(entry, LazyValue)]

        def run() -> list[torch.Tensor]:
            before = torch.default_generator.get_state()
            try:
                found = function(*computed(entries))
            except (UnknownValue, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
                return []
            if torch.equal(torch.default_generator.get_state(), before):
                return [found]
            torch.default_generator.set_state(before)
            return []

        from_data = any(entry.from_data for entry in lazies)
        origins = frozenset[Origin]().union(*(entry.origins for entry in lazies))
        self._remember_lazily(run, [result], needs=lazies, from_data=from_data, origins=origins)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: torch.Tensor) -> None:
        """Remember numbers that stand for those which the GPU would draw; fractions count as data."""
        self._forget_all(written(func, args))
        in_place = func._schema.is_mutable
        follows = any(isinstance(value, torch.Tensor) for value in args[1:]) or (in_place and drawn.requires_grad)
        if follows or not drawn.is_meta or drawn.numel() > _MAX_KNOWN_ELEMENTS:
            return
        if args and isinstance(args[0], torch.Tensor):
            like = torch.empty((), dtype=args[0].dtype, device=CPU).expand(args[0].shape)
            args = (like.contiguous() if in_place else like, *args[1:])
        options: dict[str, Any] = {"device": CPU, "pin_memory": False} if "device" in kwargs else {}
        run = self._deferred(func, args, {**kwargs, **options, **dict.fromkeys(kwargs.keys() & {"generator"})})
        is_data, origins = drawn.is_floating_point(), frozenset[Origin]({"draw"})
        self.remember(drawn, LazyValue(run, 0, drawn.shape, from_data=is_data, origins=origins))

    def _starts_anew(self, target: torch.Tensor, source: Any = None) -> bool:
        """Return whether known values overwrite a tensor whose own were unknown, or all of one whose were assumed.

        Other views of its storage may overlap, and are not known any more.
        """
        if not target.is_meta or (isinstance(source, torch.Tensor) and source.is_meta and self.entry(source) is None):
            return False
        entry = self.entry(target)
        is_assumed = isinstance(entry, LazyValue) and (entry.from_data or bool(entry.origins))
        if entry is not None and not (is_assumed and target.nbytes == target.untyped_storage().nbytes()):
            return False
        self.forget(target)
        return True

    def _forget_all(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self.forget(tensor)

    def _compute_pending(self) -> None:
        """Compute all values that nobody asked for yet: those that they follow from are about to change."""
        for value in list(self._pending.values()):
            value.get()
        self._pending.clear()

    def _remember_lazily(
        self,
        run: Callable[[], list[torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        *,
        needs: Sequence[LazyValue],
        from_data: bool,
        origins: frozenset[Origin],
    ) -> None:
        once = cache(run)
        for index, tensor in enumerate(outputs):
            value = LazyValue(once, index, tensor.shape, needs=needs, from_data=from_data, origins=origins)
            self._pending[value.number] = value
            self.remember(tensor, value)

    def _deferred(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], list[torch.Tensor]]:
        """Return a function that runs the operation on today's values; no results where the host cannot run it."""
        options: dict[str, Any] = kwargs | ({"device": CPU} if kwargs.get("device") is not None else {})
        if isinstance(out := kwargs.get("out"), torch.Tensor):
            options["out"] = torch.empty(0, dtype=out.dtype, device=CPU)  # the tensor itself would never die
        values = self._entries(args)

        def run() -> list[torch.Tensor]:
            try:
                with self._own_numbers() if torch.Tag.nondeterministic_seeded in func.tags else nullcontext():
                    return flat(func(*computed(values), **options))
            except (UnknownValue, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
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
            return self.entry(value) if value.is_meta else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._entries(v) for v in value)
        return value


def _is_state(name: str, made: torch.Tensor) -> bool:
    """Return whether a tensor that is filled with one number is a gradient or a state, which nobody asks about."""
    is_large = made.is_floating_point() and made.numel() > _MAX_EAGER_ELEMENTS
    return not made.is_meta or (is_large and name in _SAME_SHAPE | {"aten::fill_", "aten::zero_"})
