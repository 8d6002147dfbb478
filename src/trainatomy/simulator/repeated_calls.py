"""Calls that repeat an earlier one in the trace: what is remembered of one, and how it is written once more.

A call is a stretch of the run with tensors as inputs and outputs: the forward pass of a batch, or of a layer.  It
refers to allocations by names that are the same in each call, so that two calls that do the same are equal.

Layers of a model that generates: what one layer does for a token, the others of its kind are written to do as well.

A model of 30 layers runs each of them for each of hundreds of tokens.  All layers are executed for the prompts and the
first two further tokens.  Those that are built alike and did the same form a kind; from then on the first one of a kind
is executed for each token, and the others are copies of it, if their inputs have the same shapes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from trainatomy.simulator.operations import Recording
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.stretches import (
    INPUT,
    OLDER,
    OWN,
    WEIGHT,
    Columns,
    Entry,
    Inputs,
    Name,
    describe,
    read,
    remains,
    write,
)
from trainatomy.training.process import host_states
from trainatomy.training.quantization import scales
from trainatomy.training.stored_weights import numbers

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Output(NamedTuple):
    """A tensor that a call returns: its allocation (one of its own, or of an input), and its layout there."""

    name: Name
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    elements: int
    dtype: torch.dtype


class Module(NamedTuple):
    """The module whose forward a call is: its path, and the allocations of its weights."""

    path: str = ""
    weights: tuple[int, ...] = ()

    def relative(self, module: str) -> tuple[bool, str]:
        """Return whether a module is inside this one, and its path there, or else its whole path."""
        is_inside = module.startswith(self.path)
        return is_inside, module[len(self.path) :] if is_inside else module

    def absolute(self, relative: tuple[bool, str]) -> str:
        """Return the path of a module that is to this one what ``relative`` says."""
        is_inside, path = relative
        return self.path + path if is_inside else path


_NO_MODULE = Module()


@dataclass(slots=True)
class Window:
    """Trace and outputs of one executed call."""

    inputs: Inputs
    module: Module
    event: int
    numbers: range
    functions: list[Any]
    entries: Sequence[Entry] = ()
    outputs: tuple[list[Any], TreeSpec] | None = None
    recording: Recording | None = None
    _columns: Columns | None = None

    @property
    def columns(self) -> Columns:
        """The entries, set out to be written again."""
        if self._columns is None:
            self._columns = Columns(self.entries)
        return self._columns

    def name(self, number: int) -> Name:
        """Return how this call refers to an allocation."""
        if number in self.numbers:
            return OWN, number - self.numbers.start
        if number in self.inputs.places:
            return INPUT, self.inputs.places[number]
        weights = self.module.weights
        return (WEIGHT, weights.index(number)) if number in weights else (OLDER, number)

    def did_as(self, other: Window) -> bool:
        """Return whether another call had the same inputs and did the same."""
        return (
            self.inputs.shapes == other.inputs.shapes
            and self.functions == other.functions
            and self.entries == other.entries
            and self.outputs == other.outputs
        )


class RepeatedCalls:
    """Follows calls and writes copies of them.

    Args:
        recorder: Recorder of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._functions: list[Any] | None = None
        self._records = False

    def begin(self, inputs: Inputs, module: Module = _NO_MODULE, *, records: bool = True) -> Window:
        """Begin to follow a call that is executed; ``records``: whether its operations are recorded for copies."""
        recorder = self._recorder
        start = len(recorder.trace.origins)
        self._functions, recorder.functions = recorder.functions, []
        self._records = records
        if records:
            recorder.operations.begin_recording(recorder.step)
        return Window(inputs, module, len(recorder.trace.events), range(start, start), recorder.functions)

    def end(self, window: Window, outputs: Any) -> None:
        """End a call that was executed."""
        if self._records:
            window.recording = self._recorder.operations.end_recording()
        self._recorder.functions, self._functions = self._functions, None
        window.numbers = range(window.numbers.start, len(self._recorder.trace.origins))
        trace = self._recorder.trace
        events = range(window.event, len(trace.events))
        window.entries = tuple(read(trace, events, window.name, module_of=window.module.relative))
        window.outputs = self._outputs(window, outputs)

    def abandon(self) -> None:
        """Follow a call no further that ended with an error."""
        if self._records:
            self._recorder.operations.end_recording()
        self._recorder.functions, self._functions = self._functions, None

    def may_repeat(self, window: Window, *, frees_inputs: bool = False) -> bool:
        """Return whether a call left its outputs behind and nothing else, and no outputs share memory.

        Args:
            window: The call.
            frees_inputs: Whether it may release inputs.
        """
        if window.outputs is None or not self._recorder.is_alone:
            return False
        left, released = remains(window.entries, len(window.numbers))
        kept = [each.name[1] for each in window.outputs[0] if isinstance(each, Output) and each.name[0] == OWN]
        return left == set(kept) and len(kept) == len(left) and released <= ({OWN, INPUT} if frees_inputs else {OWN})

    def write_again(self, template: Window, inputs: Inputs, given: Any, to: Module = _NO_MODULE) -> Any:
        """Write a call once more and return its outputs.

        Args:
            template: The call.
            inputs: Description of the inputs of the copy.
            given: These inputs themselves.
            to: The module whose forward it is, if it is one.
        """
        recorder, trace, leaves = self._recorder, self._recorder.trace, tree_leaves(given)
        assert template.outputs is not None
        numbers = {place: number for number, place in inputs.places.items()}
        start, first_event = len(trace.origins), len(trace.events)

        def number_of(name: Name) -> int:
            kind, number = name
            if kind == OWN:
                return start + number
            if kind == INPUT:
                return numbers[number]
            return to.weights[number] if kind == WEIGHT else number

        columns = template.columns
        write(trace, columns, number_of, recorder.step, to.absolute)
        with torch._C.DisableTorchFunction():
            for kind, place in columns.names:
                if kind == INPUT:  # an input that a call refers to is one that it releases
                    recorder.ledger.take(leaves[place].untyped_storage())
        if (recording := template.recording) is not None:
            held = [tuple(number_of(template.name(number)) for number in each.outputs) for each in recording.operations]
            recorder.operations.write_again(
                _moved(recording, template.module.path, to.path), first_event - template.event, held
            )
        kept, structure = template.outputs
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            found = [self._output(each, start, leaves) for each in kept]
        return tree_unflatten(found, structure)

    def _outputs(self, window: Window, outputs: Any) -> tuple[list[Any], TreeSpec] | None:
        """Return how to make the outputs of a call again; None if that is not possible."""
        leaves, structure = tree_flatten(outputs)
        found: list[Any] = []
        with torch._C.DisableTorchFunction():
            for leaf in leaves:
                if isinstance(leaf, _PLAIN):
                    found.append(leaf)
                    continue
                number = self._recorder.number_of(leaf) if isinstance(leaf, torch.Tensor) else None
                if number is None or number < 0:
                    return None
                name = window.name(number)
                if name[0] not in (OWN, INPUT):
                    return None
                elements = leaf.untyped_storage().nbytes() // leaf.itemsize
                offset = int(leaf.storage_offset())
                found.append(Output(name, leaf.shape, leaf.stride(), offset, elements, leaf.dtype))
        return found, structure

    def _output(self, output: Any, start: int, leaves: list[Any]) -> Any:
        """Return an output of a copied call: a tensor for its allocation, or an alias of an input."""
        if not isinstance(output, Output):
            return output
        (kind, number), shape, strides, offset, elements, dtype = output
        if kind == INPUT:
            return leaves[number].detach().as_strided(shape, strides, offset)
        made = torch.empty_strided((elements,), (1,), dtype=dtype, device="meta")
        self._recorder.ledger.assign(made.untyped_storage(), start + number)
        return made.as_strided(shape, strides, offset)


def _moved(recording: Recording, path: str, to: str) -> Recording:
    """Return the operations of a module as those of another one."""
    if path == to:
        return recording
    operations = [
        each._replace(module=to + each.module[len(path) :]) if each.module.startswith(path) else each
        for each in recording.operations
    ]
    return replace(recording, operations=operations)


_EXECUTED = 2
"""Tokens after the prompts for which all layers are executed."""
_FEWEST = 3
"""Layers of a list in which copies are worth a comparison."""
_SETTINGS = (bool, int, float, str, type(None))
_OWN_NUMBER = ("layer", "block", "idx", "index")
"""Parts of the names of attributes that hold the number of a layer."""
_OF_ANOTHER = object()
"""Stands for a weight that is none of a layer's; such a call is never repeated."""
_OF_TWO_CACHES = ("self_attention_cache", "cross_attention_cache")


class Layer:
    """One layer of a list of layers.

    Attributes:
        module: The module.
        parameters: Its parameters.
        places: Their places among them, by their identities.
        numbers: Numbers of the layer's entries in a cache, as its modules know them.
        weights: Allocations of its weights.
        windows: Calls that were executed to be compared, one for each token.
        kind: Number of its kind; None before it is known, or where no other layer does the same.
    """

    def __init__(self, module: nn.Module, number_of: Callable[[torch.Tensor], int | None]) -> None:
        self.module = module
        self.parameters = list(module.parameters())
        self.places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        held = (*map(numbers, module.parameters()), *module.buffers(), *scales(module))
        self.weights = tuple(number for tensor in held if (number := number_of(tensor)) is not None and number >= 0)
        found = (vars(each).get("layer_idx") for each in module.modules())
        self.numbers = {number for number in found if isinstance(number, int)}
        self.windows: list[Window] = []
        self.kind: int | None = None

    def built(self) -> Any:
        """Return what tells how the layer is built: classes, settings, shapes."""
        return [
            (
                type(module),
                [(name, value) for name, value in vars(module).items() if _is_setting(name, value)],
                [
                    (name, tensor.shape, tensor.dtype, tensor.requires_grad)
                    for tensors in (module._parameters, module._buffers)
                    for name, tensor in tensors.items()
                    if tensor is not None
                ],
            )
            for module in self.module.modules()
        ]

    def cache_entries(self, cache: Any) -> list[Any] | None:
        """Return the objects that hold this layer's part of a cache; None if they are not known."""
        caches = [getattr(cache, name) for name in _OF_TWO_CACHES if hasattr(cache, name)] or [cache]
        number = next(iter(self.numbers)) if len(self.numbers) == 1 else -1
        found = [getattr(each, "layers", ())[number : number + 1] for each in caches]
        return [entries[0] for entries in found] if number >= 0 and all(found) else None


class RepeatedLayers:
    """Executes the layers of a model, or writes them as copies of each other, in a call of ``generate()``.

    Args:
        recorder: Recorder of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls = RepeatedCalls(recorder)
        self._layers: list[Layer] = []
        self._own: list[Any] = []
        self._templates: dict[int, Window] = {}
        self._token = 0
        self._built: list[Any] = []
        self._states: Any = None

    def begin(self, model: nn.Module) -> None:
        """Begin to follow the layers of a model."""
        self._layers, self._token = [Layer(module, self._recorder.number_of) for module in _layers_of(model)], 0
        self._own = [vars(layer.module).get("forward") for layer in self._layers]
        for layer in self._layers:
            layer.module.forward = self._forward(layer, layer.module.forward)

    def end(self) -> None:
        """Let the layers be as they were."""
        for layer, forward in zip(self._layers, self._own, strict=True):
            if forward is None:
                del layer.module.forward
            else:
                layer.module.forward = forward
        self._layers, self._built = [], []
        self._templates.clear()

    def token_begin(self) -> None:
        """Begin a further token of a call of ``generate()``."""
        self._token += 1
        self._templates.clear()
        if self._token == 1:
            self._built, self._states = [layer.built() for layer in self._layers], host_states()
        elif self._token == _EXECUTED + 1:
            self._find_kinds()

    def _find_kinds(self) -> None:
        """Give layers that are built alike and did the same one kind, unless something changes from token to token."""
        if self._built != [layer.built() for layer in self._layers] or host_states() != self._states:
            return
        firsts: list[int] = []
        for number, layer in enumerate(self._layers):
            if len(layer.windows) != _EXECUTED or not all(map(self._may_repeat, layer.windows)):
                continue
            alike = (first for first in firsts if self._are_alike(first, number))
            layer.kind = next(alike, number)
            if layer.kind == number:
                firsts.append(number)

    def _may_repeat(self, window: Window) -> bool:
        return self._calls.may_repeat(window, frees_inputs=True)

    def _are_alike(self, one: int, other: int) -> bool:
        if self._built[one] != self._built[other]:
            return False
        pairs = zip(self._layers[one].windows, self._layers[other].windows, strict=True)
        return all(window.did_as(theirs) for window, theirs in pairs)

    def _forward(self, layer: Layer, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            follows = layer.kind is not None or 0 < self._token <= _EXECUTED
            if not follows or torch.is_grad_enabled() or not self._recorder.is_alone:
                return original(*args, **kwargs)
            entries = _entries_of(layer, args, kwargs)
            inputs = None if entries is None else describe(self._recorder, self._given(layer, args, kwargs, entries))
            if entries is None or inputs is None:
                return original(*args, **kwargs)
            module = Module(recorder.module, layer.weights)
            template = None if layer.kind is None else self._templates.get(layer.kind)
            if template is not None and template.inputs.shapes == inputs.shapes:
                given = self._given(layer, args, kwargs, entries)
                result, changes, copies = self._calls.write_again(template, inputs, given, module)
                for entry, values in zip(entries, changes, strict=True):
                    vars(entry).update(values)
                self._keep_copies(layer, copies)
                return result
            before, kept = [_attributes(entry) for entry in entries], len(recorder.weight_copies)
            window = self._calls.begin(inputs, module, records=recorder.operations.recording)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                self._calls.abandon()
                raise
            changes = [_changed(entry, known) for entry, known in zip(entries, before, strict=True)]
            self._calls.end(window, (result, changes, self._new_copies(layer, kept)))
            if layer.kind is None:
                layer.windows.append(window)
            elif self._may_repeat(window):
                self._templates[layer.kind] = window
            return result

        return forward

    def _given(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], entries: list[Any]) -> Any:
        """Return the inputs of a layer: arguments, its part of the cache, and copies that autocast keeps of weights."""
        copies = self._recorder.weight_copies
        return (
            [None if _is_cache(value) else value for value in args],
            {name: None if _is_cache(value) else value for name, value in kwargs.items()},
            [(type(entry).__name__, dict(vars(entry))) for entry in entries],
            [(place, copies[key][1]) for key, place in layer.places.items() if key in copies],
        )

    def _new_copies(self, layer: Layer, before: int) -> list[Any]:
        """Return the places of weights that autocast has copied, and the copies, in their order."""
        added = islice(self._recorder.weight_copies.items(), before, None)
        return [(layer.places.get(key, _OF_ANOTHER), copy) for key, (_, copy) in added]

    def _keep_copies(self, layer: Layer, copies: list[Any]) -> None:
        for place, copy in copies:
            parameter = layer.parameters[place]
            self._recorder.weight_copies[id(parameter)] = parameter, copy


def _layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of all lists of layers in a model, but not those inside of other layers."""
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        inside.update(map(id, module.modules()))
        kinds = defaultdict[type, int](int)
        for layer in module:
            kinds[type(layer)] += 1
        if max(kinds.values(), default=0) >= _FEWEST:
            yield from module


def _is_setting(name: str, value: Any) -> bool:
    """Return whether an attribute is a setting of a module, and not its number among others."""
    is_number = type(value) is int and any(part in name for part in _OWN_NUMBER)
    return isinstance(value, _SETTINGS) and not is_number


def _entries_of(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the objects with the layer's keys and values, none without a cache; None if they are not known."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return []
    return layer.cache_entries(caches[0]) if len(caches) == 1 else None


def _is_cache(value: Any) -> bool:
    is_object = not isinstance(value, (torch.Tensor, *_SETTINGS))
    return is_object and (hasattr(value, "layers") or any(hasattr(value, name) for name in _OF_TWO_CACHES))


def _attributes(entry: Any) -> dict[str, Any]:
    """Return the attributes of an object, without keeping its tensors alive."""
    return {
        name: weakref.ref(value) if isinstance(value, torch.Tensor) else value for name, value in vars(entry).items()
    }


def _changed(entry: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that a layer has set anew."""

    def is_new(name: str, value: Any) -> bool:
        known = before.get(name, _changed)
        return known() is not value if isinstance(known, weakref.ref) else known is not value and known != value

    return {name: value for name, value in vars(entry).items() if is_new(name, value)}
