"""Checkpoints in a simulated training: the Trainer's own code writes files of the right size without data."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

_SAVERS = ("transformers.modeling_utils.safe_save_file", "safetensors.torch.save_file")
_ALIGNMENT = 64
"""Bytes to which ``torch.save`` aligns each storage (caffe2/serialize/inline_container.h, torch 2.9-2.13)."""
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExecutedSaving:
    """A checkpoint in the trace: its events, and the sizes of its files."""

    events: range
    files: dict[str, int]


@contextlib.contextmanager
def files_without_data() -> Iterator[None]:
    """Let weights and states be saved as sparse files: sizes are right, and nothing is written.

    Tensors that share memory are recognised by their storage, as meta tensors have no address.
    Source: ``id_tensor_storage`` (transformers/pytorch_utils.py), ``get_torch_storage_id`` (huggingface_hub).
    """
    original = torch.save

    def save(value: Any, file: Any, *arguments: Any, **keywords: Any) -> None:
        if not isinstance(file, str | os.PathLike) or not _tensors(value):
            original(value, file, *arguments, **keywords)
            return
        _write_sparse(file, _saved_bytes(value, original))

    def end_of(tensor: torch.Tensor) -> int:
        return int(tensor.nbytes)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "save", save))
        peft = ("peft.peft_model.safe_save_file",) if "peft.peft_model" in sys.modules else ()
        for place in (*_SAVERS, *peft):
            module, _, name = place.rpartition(".")
            stack.enter_context(mock.patch.object(import_module(module), name, _save_safely))
        stack.enter_context(mock.patch.object(torch.cuda.random, "get_rng_state", _random_state))
        modeling = import_module("transformers.modeling_utils")
        stack.enter_context(mock.patch.object(modeling, "id_tensor_storage", _identity))
        stack.enter_context(mock.patch.object(modeling, "_end_ptr", end_of))
        hub = import_module("huggingface_hub.serialization._torch")
        stack.enter_context(mock.patch.object(hub, "get_torch_storage_id", _identity))
        yield


def _random_state(device: Any = "cuda") -> torch.Tensor:
    """Return the state of a GPU's generator, which is on the host: its seed and its offset."""
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _save_safely(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
    _write_sparse(filename, safetensors_bytes(tensors, metadata))


def safetensors_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> int:
    """Return the size of a file of safetensors: 8 bytes, a header in JSON padded to 8 bytes, and the data."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])):  # as it sorts them
        begin, end = end, end + int(tensor.nbytes)
        kind = _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.float8_").upper())
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-text // 8) * 8 + end


def _saved_bytes(value: Any, save: Any) -> int:
    """Return the size of a file of ``torch.save``: what it writes for tensors of one element, and their storages."""
    storages: dict[int, torch.Tensor] = {}
    small: dict[int, torch.Tensor] = {}
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        for tensor in _tensors(value):
            storages.setdefault(tensor.untyped_storage()._cdata, tensor)
        for key, tensor in storages.items():
            small[key] = torch.zeros(1, dtype=tensor.dtype, device="cpu")

        def replaced(leaf: Any) -> Any:
            return small[leaf.untyped_storage()._cdata] if isinstance(leaf, torch.Tensor) else leaf

        buffer = io.BytesIO()
        save(tree_map(replaced, value), buffer)
        sizes = [int(tensor.untyped_storage().nbytes()) for tensor in storages.values()]
    grown = sum(_aligned(size) - _ALIGNMENT for size in sizes)
    return buffer.getbuffer().nbytes + grown


def _aligned(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _identity(tensor: torch.Tensor) -> tuple[Any, int, int]:
    """Return what tells a tensor's storage from others."""
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
    return tensor.device, int(storage._cdata), int(storage.nbytes())


def _write_sparse(file: Any, size: int) -> None:
    with Path(file).open("wb") as opened:
        opened.truncate(size)
