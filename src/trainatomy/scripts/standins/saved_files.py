"""Files with tensors that a script saves: the copies that the host holds meanwhile, and their sizes on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from trainatomy.simulator.storages import Storages, storage_of


class SavedFiles:
    """The files of a script.

    Attributes:
        host_bytes: Most that is copied to host memory at once to save a file.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._sizes: dict[str, int] = {}
        self.host_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes.values())

    def save(self, file: Any, values: Iterable[Any], *, at_once: bool) -> None:
        """Note a file, which takes the place of an earlier one of its name.

        Args:
            file: Its path, or that of a folder with the files of a model.
            values: What is in it, tensors among others.
            at_once: Whether all tensors are copied before the first is written (safetensors 0.8,
                ``_flatten_as_ptr``), or one storage after the other (``torch.save``).
        """
        with torch._C.DisableTorchFunction():
            tensors = [one for one in values if isinstance(one, torch.Tensor) and one.layout == torch.strided]
            storages = {storage_of(one)._cdata: storage_of(one).nbytes() for one in tensors}
            copied = {
                storage_of(one)._cdata: storage_of(one).nbytes()
                for one in tensors
                if one.is_meta and self._storages.on_device(one)
            }
        if storages:
            self._sizes[os.path.realpath(os.fspath(file))] = sum(storages.values())
        most = sum(copied.values()) if at_once else max(copied.values(), default=0)
        self.host_bytes = max(self.host_bytes, most)
