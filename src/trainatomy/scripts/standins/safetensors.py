"""Files of safetensors: nothing is written, and what the script saved can be loaded again, without data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainatomy.scripts.standins.notes import StandIns
    from trainatomy.scripts.standins.savers import Checkpoints

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
