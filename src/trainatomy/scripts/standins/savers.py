"""``torch.save`` and ``torch.load``.

Nothing is written, or a file of the right size without data; what the script saved is remembered.

Files of safetensors: nothing is written, and what the script saved can be loaded again, without data.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from trainatomy.scripts.standins.notes import StandIns
from trainatomy.simulator.evaluation import files_without_data
from trainatomy.simulator.placement import names_cuda

_LIBRARIES = ("safetensors", "accelerate", "transformers", "peft", "diffusers", "timm", "trl", "lightning")


@dataclass(frozen=True, slots=True)
class _Originals:
    """The functions of safetensors."""

    save_file: Any
    load_file: Any
    safe_open: Any


def put(stand_ins: StandIns, checkpoints: Checkpoints, module: Any) -> None:
    """Put them in place, also where libraries have imported the functions already."""
    originals = _Originals(module.save_file, module.load_file, module.safe_open)
    files = _Files(stand_ins, checkpoints, originals)
    replacements = (
        (originals.save_file, files.save_file),
        (originals.load_file, files.load_file),
        (originals.safe_open, files.open),
    )
    modules = [one for name, one in [*sys.modules.items()] if name.partition(".")[0] in _LIBRARIES]
    for owner in modules:
        for name, value in [*vars(owner).items()]:
            for function, replacement in replacements:
                if value is function:
                    stand_ins.put(owner, name, replacement)
    stand_ins.put(module, "_is_complete", _is_complete)


def _is_complete(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers its storage; the original compares addresses, which are 0 without a GPU."""
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


class _Files:
    """The functions of safetensors; files that the script did not write are read by the original ones."""

    def __init__(self, stand_ins: StandIns, checkpoints: Checkpoints, functions: _Originals) -> None:
        self._stand_ins, self._checkpoints, self._originals = stand_ins, checkpoints, functions

    def save_file(self, tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None, **_: Any) -> None:
        """Remember the tensors of a file."""
        target = self._stand_ins.files.to_write(filename)
        Path(target).touch()
        self._checkpoints.remember({"tensors": dict(tensors), "metadata": metadata}, target)
        self._stand_ins.saved.save(filename, tensors.values(), at_once=True)

    def load_file(self, filename: Any, device: Any = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of a file on a device."""
        saved = self._checkpoints.saved(filename)
        if saved is None:
            return dict(self._originals.load_file(filename, device, **options))
        found: dict[str, torch.Tensor] = self._checkpoints.restored(saved["tensors"], device)
        return found

    def open(self, filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any) -> Any:
        """Open a file, whose tensors are put on a device one by one."""
        saved = self._checkpoints.saved(filename)
        if saved is None:
            return self._originals.safe_open(filename, framework, device=device, **options)
        return _OpenFile(self._checkpoints, saved, device)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """``safe_open`` of a file that the script saved: descriptions of its tensors, and its texts."""

    checkpoints: Checkpoints
    content: Mapping[str, Any]
    device: Any

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None: ...

    def metadata(self) -> dict[str, str] | None:
        """Return the texts of the file."""
        found: dict[str, str] | None = self.content["metadata"]
        return found

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return sorted(self.content["tensors"])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        found: torch.Tensor = self.checkpoints.restored(self.content["tensors"][name], self.device)
        return found

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors."""
        return {name: self.get_tensor(name) for name in self.keys()}

    offset_keys = keys
    get_slice = get_tensor


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    checkpoints, original, files = Checkpoints(stand_ins), torch.save, stand_ins.saved
    write: Any = None

    def save(value: Any, file: Any, *rest: Any, **more: Any) -> None:
        if isinstance(file, str | os.PathLike):
            target = stand_ins.files.to_write(file)
            if write is None:
                Path(target).touch()
            else:
                write(value, target, *rest, **more)
            checkpoints.remember(value, target)
            files.save(file, tree_leaves(value), at_once=False)
        elif _has_values(value):
            original(value, file, *rest, **more)  # pickle saves the data of each tensor so
        else:
            checkpoints.remember(value, file)

    def write_sizes(_: Any) -> None:
        """Let files have their size, which the Trainer asks for."""
        nonlocal write
        with mock.patch.object(torch, "save", original):
            stand_ins.stack.enter_context(files_without_data(safetensors=False))
            write = torch.save

    stand_ins.put(torch, "save", save)
    stand_ins.put(torch, "load", checkpoints.load)
    stand_ins.when("transformers.trainer", write_sizes)
    stand_ins.when("safetensors.torch", partial(put, stand_ins, checkpoints))


def _has_values(value: Any) -> bool:
    """Return whether all tensors in a value have data; those of a module are not asked."""
    with torch._C.DisableTorchFunction():
        leaves = tree_leaves(value)
        return not any(isinstance(leaf, torch.nn.Module) or getattr(leaf, "is_meta", False) for leaf in leaves)


_PROTOCOL = 2
"""Protocol of pickle that ``torch.save`` uses."""
_MARK = "trainatomy: a checkpoint without data, number {:016}"
"""What files and buffers begin with in place of tensors without data: by it, a copy of their bytes is known."""


class Checkpoints:
    """Files of ``torch.save``, without data, and a ``torch.load`` that puts tensors where PyTorch would.

    PyTorch loads a tensor to the device that it was saved from, unless ``map_location`` names another: a checkpoint of
    a model on the GPU takes memory there once more.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._saved: dict[bytes, Any] = {}
        self._load: Any = torch.load

    def remember(self, value: Any, file: Any) -> None:
        """Keep the tensors of a checkpoint as what they are, a place and a size, and mark the buffer or the file."""
        mark = _MARK.format(len(self._saved)).encode()
        if any(isinstance(leaf, torch.nn.Module) for leaf in tree_leaves(value)):
            self._saved[mark] = _Pickled.of(value, self._described)
        else:
            self._saved[mark] = tree_map_only(torch.Tensor, self._described, value)
        with Path(file).open("r+b") if isinstance(file, str) else contextlib.nullcontext(file) as target:
            target.write(mark)

    def load(self, file: Any, map_location: Any = None, **options: Any) -> Any:
        """Load a checkpoint of the script, or one that lay there before."""
        content = self.saved(file)
        if content is None:
            return self._from_disk(file, map_location, options)
        return self.restored(content, map_location)

    def restored(self, content: Any, map_location: Any) -> Any:
        """Return what was saved with its tensors where PyTorch would put them."""

        def placed(saved: _Saved) -> torch.Tensor:
            return self._placed(saved.made(self._stand_ins), saved.place, map_location)

        if isinstance(content, _Pickled):
            return content.copy(placed)
        return tree_map_only(_Saved, placed, content)

    def saved(self, file: Any) -> Any:
        """Return what the script saved in a file or a buffer, with its tensors described; None if it did not."""
        if isinstance(file, str | os.PathLike):
            if not os.path.isfile(file):  # noqa: PTH113
                return None
            with open(file, "rb") as opened:  # noqa: PTH123
                return self.saved(opened)
        begin = file.tell()
        mark = file.read(len(_MARK.format(0)))
        file.seek(begin)
        return self._saved.get(mark)

    def _from_disk(self, file: Any, map_location: Any, options: dict[str, Any]) -> Any:
        """Load a file that the script did not write; its tensors on the GPU lose their values on the way there."""
        places: dict[int, str] = {}

        def to_host(storage: torch.UntypedStorage, place: str) -> torch.UntypedStorage:
            places[storage._cdata] = place
            return storage

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                place = places.get(tensor.untyped_storage()._cdata, "cpu")
            return self._placed(tensor, place, map_location)

        content = self._load(file, map_location=to_host, **options)
        return tree_map_only(torch.Tensor, placed, content)

    def _described(self, tensor: torch.Tensor) -> _Saved:
        with torch._C.DisableTorchFunction():
            place = "cuda:0" if self._stand_ins.process.placement.is_device(tensor) else "cpu"
            values = None if tensor.is_meta else tensor.detach().clone()
            return _Saved(tuple(tensor.shape), tensor.dtype, place, values)

    def _placed(self, tensor: torch.Tensor, place: str, map_location: Any) -> torch.Tensor:
        """Return a tensor of the host where ``torch.load`` would put it."""
        if map_location is None:
            target = place
        elif isinstance(map_location, dict):
            target = map_location.get(place, place)
        elif callable(map_location):
            target = "cpu"  # lambda storage, location: storage
        else:
            target = map_location
        if not names_cuda(target) or isinstance(tensor, torch.nn.Parameter):
            return tensor
        placement = self._stand_ins.process.placement
        return placement.move(tensor, placement.check(target))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that was saved: its size, its place, and its values if it has any."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str
    values: torch.Tensor | None

    def made(self, stand_ins: StandIns) -> torch.Tensor:
        """Return a tensor of the host like it."""
        if self.values is not None:
            return self.values.clone()
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
            stand_ins.process.storages.mark_host([tensor])
        return tensor


class _WithoutTensors(pickle.Pickler):
    """Pickler that leaves tensors out, each once; the numbers that stand for them are their places in ``tensors``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, _PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _WithTensors(pickle.Unpickler):
    """Unpickler that puts the tensors of a list in the places of their numbers."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


@dataclass(frozen=True, slots=True)
class _Pickled:
    """A checkpoint with whole modules, which come back as copies.

    Attributes:
        content: What pickle writes of it.
        tensors: Its tensors, and for parameters whether they require gradients.
    """

    content: bytes
    tensors: tuple[tuple[_Saved, bool | None], ...]

    @classmethod
    def of(cls, value: Any, described: Callable[[torch.Tensor], _Saved]) -> _Pickled:
        """Pickle a checkpoint; what pickle refuses, ``torch.save`` refuses, too."""
        file = io.BytesIO()
        pickler = _WithoutTensors(file)
        pickler.dump(value)
        kinds = (one.requires_grad if isinstance(one, torch.nn.Parameter) else None for one in pickler.tensors)
        return cls(file.getvalue(), tuple(zip(map(described, pickler.tensors), kinds, strict=True)))

    def copy(self, placed: Callable[[_Saved], torch.Tensor]) -> Any:
        """Return a copy of the checkpoint with tensors that ``placed`` makes."""
        tensors = [
            placed(saved) if requires_grad is None else torch.nn.Parameter(placed(saved), requires_grad)
            for saved, requires_grad in self.tensors
        ]
        return _WithTensors(io.BytesIO(self.content), tensors).load()
