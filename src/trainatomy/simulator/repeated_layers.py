"""Layers of a model that generates: what one layer does for a token, the others of its kind are written to do as well.

A model of 30 layers runs each of them for each of hundreds of tokens.  All layers are executed for the prompts and the
first two further tokens.  Those that are built alike and did the same form a kind; from then on the first one of a kind
is executed for each token, and the others are copies of it, if their inputs have the same shapes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import nn

from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.repeated_calls import Module, RepeatedCalls, Window
from trainatomy.simulator.stretches import describe
from trainatomy.training.process import host_states
from trainatomy.training.quantization import scales
from trainatomy.training.stored_weights import numbers

_EXECUTED = 2
"""Tokens after the prompts for which all layers are executed."""
_FEWEST = 3
"""Layers of a list in which copies are worth a comparison."""
_OWN_NUMBER = ("layer", "block", "idx", "index")
"""Parts of the names of attributes that hold the number of a layer."""
_PLAIN = (bool, int, float, str, type(None))
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
    return isinstance(value, _PLAIN) and not is_number


def _entries_of(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the objects with the layer's keys and values, none without a cache; None if they are not known."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return []
    return layer.cache_entries(caches[0]) if len(caches) == 1 else None


def _is_cache(value: Any) -> bool:
    is_object = not isinstance(value, (torch.Tensor, *_PLAIN))
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
