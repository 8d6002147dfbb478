"""The package flash-attn where a script asks for it: it has only CUDA kernels, so nobody can install it without a GPU.

Libraries find it by every usual probe: an import, ``find_spec``, its version. Where nothing names it, it is not there,
because some frameworks choose it by themselves where it is.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from trainatomy.errors import SimulationError
from trainatomy.simulator.adapters.flash_attention import (
    GLOBALS,
    NOTE,
    IndexPutFirstAxis,
    check_gpu,
    flash_functions,
    packed_functions,
    pad_input,
)

if TYPE_CHECKING:
    from trainatomy.scripts.standins.notes import StandIns

_VERSION = "2.8.3"
_NAMED = re.compile(r"flash_attn|flash-attn|flash_attention(?!_[34])|\bfa2\b")
"""What names it in a script, an argument or a configuration."""
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")
_LARGEST = 2**20
"""Bytes of a configuration that is read."""


def names_flash_attention(arguments: Iterable[str], files: Iterable[Path]) -> bool:
    """Return whether the arguments of a command, the configurations that they name, or some files name the package."""
    configurations = [Path(one.rpartition("=")[2]) for one in arguments if one.endswith(_CONFIGURATIONS)]
    small = [one for one in configurations if one.is_file() and one.stat().st_size <= _LARGEST]
    texts = [*arguments, *(one.read_text(encoding="utf-8", errors="replace") for one in (*files, *small))]
    return any(_NAMED.search(text) for text in texts)


def install(stand_ins: StandIns, *, is_named: bool) -> None:
    """Put the package in place where it is named, and where transformers is asked for it."""
    package = _Package(stand_ins)
    if is_named and _is_supported(stand_ins):
        package.show()
    stand_ins.when("transformers.modeling_flash_attention_utils", package.forget_functions)
    stand_ins.when("transformers.modeling_utils", package.follow_requests)


def _is_supported(stand_ins: StandIns) -> bool:
    try:
        check_gpu(stand_ins.process.processor)
    except SimulationError:
        return False
    return True


class _Package:
    """The package of one run; it is there once it is shown."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._is_shown = False

    def show(self) -> None:
        """Let every probe find the package until the run ends."""
        if self._is_shown:
            return
        self._is_shown = True
        stack = self._stand_ins.stack
        for name, module in self._modules().items():
            before = sys.modules.get(name)
            sys.modules[name] = module
            stack.callback(_put_back, name, before)
        folder = Path(tempfile.mkdtemp(prefix="flash-attn-"))  # in the folder of the run
        information = folder / f"flash_attn-{_VERSION}.dist-info"
        information.mkdir()
        information.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {_VERSION}\n")
        information.joinpath("top_level.txt").write_text("flash_attn\n")
        stack.enter_context(mock.patch.object(sys, "path", [*sys.path, str(folder)]))
        self._stand_ins.when("transformers.utils.import_utils", self._tell_transformers)

    def _tell_transformers(self, utilities: Any) -> None:
        """Let transformers ask again: it keeps answers, and which packages there are."""
        known = getattr(utilities, "PACKAGE_DISTRIBUTION_MAPPING", None)
        if known is not None:
            self._stand_ins.stack.enter_context(mock.patch.dict(known, {"flash_attn": ["flash-attn"]}))
        for function in list(vars(utilities).values()):
            if "flash_attn" in getattr(function, "__name__", "") and hasattr(function, "cache_clear"):
                function.cache_clear()

    def forget_functions(self, module: Any) -> None:
        """Let transformers import the functions of this run."""
        for name in GLOBALS:
            if hasattr(module, name):
                self._stand_ins.put(module, name, None)

    def follow_requests(self, modeling: Any) -> None:
        """Show the package where a model is asked to use it."""
        original = getattr(modeling.PreTrainedModel, "_flash_attn_import_error", None)
        if original is None:
            return

        def asked(model: Any, flash_attn_version: Any = 2, *rest: Any, **options: Any) -> Any:
            if flash_attn_version == 2:
                check_gpu(self._stand_ins.process.processor)
                self.show()
            return original(model, flash_attn_version, *rest, **options)

        self._stand_ins.put(modeling.PreTrainedModel, "_flash_attn_import_error", asked)

    def _modules(self) -> dict[str, ModuleType]:
        multiprocessors = self._stand_ins.process.processor.multiprocessors
        dense, varlen = flash_functions(multiprocessors)
        functions = {one.__name__: self._noting(one) for one in (dense, varlen)}
        functions |= {name: self._noting(one) for name, one in packed_functions(multiprocessors).items()}
        functions["flash_attn_with_kvcache"] = _refuse_cache
        padding: dict[str, Any] = {
            one.__name__: one for one in (index_first_axis, index_put_first_axis, unpad_input, pad_input)
        }
        with contextlib.suppress(ImportError):  # some import these from it
            einops: Any = import_module("einops")
            padding |= {"rearrange": einops.rearrange, "repeat": einops.repeat}
        package = _module("flash_attn", functions | {"__version__": _VERSION})
        package.__path__ = []
        found = {"flash_attn_interface": _module("flash_attn.flash_attn_interface", functions)}
        found["bert_padding"] = _module("flash_attn.bert_padding", padding)
        for name, module in found.items():
            setattr(package, name, module)
        return {module.__name__: module for module in (package, *found.values())}

    def _noting(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        notes = self._stand_ins.process.notes

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Tensor:
            check_gpu(self._stand_ins.process.processor)
            if NOTE not in notes:
                notes.append(NOTE)
            return function(*arguments, **options)

        return call


def _put_back(name: str, module: ModuleType | None) -> None:
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=name == "flash_attn")
    vars(module).update(content)
    return module


def _refuse_cache(*_: Any, **__: Any) -> NoReturn:
    raise SimulationError("flash_attn_with_kvcache is not simulated: generate without a cache of flash-attn")


# -- flash_attn.bert_padding -------------------------------------------------------------------------------------------


class _IndexFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows, other = values.shape[0], values.shape[1:]
        flat = values.reshape(ctx.rows, -1)
        return torch.gather(flat, 0, indices[:, None].expand(-1, flat.shape[1])).reshape(-1, *other)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        other, flat = grad.shape[1:], grad.reshape(grad.shape[0], -1)
        result = torch.zeros(ctx.rows, flat.shape[1], device=grad.device, dtype=grad.dtype)
        result.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return result.reshape(ctx.rows, *other), None


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Select rows."""
    found: Tensor = _IndexFirstAxis.apply(input, indices)
    return found


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Put rows to their places among zeros."""
    found: Tensor = IndexPutFirstAxis.apply(values, indices, first_axis_dim)
    return found


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[Any, ...]:
    """Select the tokens that a mask keeps, and return them with their indices and the starts of the sequences."""
    masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = masks.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(masks.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    starts = functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, longest, used
