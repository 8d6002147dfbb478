"""Evaluations in a simulated training: batches that repeat are copied, and host arrays have no data.

Each batch of an evaluation does the same as the one before.  This is checked: a batch becomes a template if it ran the
same operations, allocations and releases as the one before it, and left only its outputs behind.  Later batches of the
same shapes are then written as copies of the template.  What the Trainer does between batches, such as gathering
outputs, is executed each time, because it grows.

Checkpoints in a simulated training: the Trainer's own code writes files of the right size without data.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from trainatomy.errors import SimulationError
from trainatomy.results.operations import Operations
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.repeated_calls import RepeatedCalls, Window
from trainatomy.simulator.storages import storage_key
from trainatomy.simulator.stretches import Inputs, describe

if TYPE_CHECKING:
    from trainatomy.simulator.process import SimulatedProcess


@dataclass(frozen=True, slots=True)
class ExecutedEvaluation:
    """An evaluation in the trace: its events, the number of its batches, and its operations."""

    events: range
    batches: int
    operations: Operations


class RepeatedBatches:
    """Follows the batches of evaluations and copies those that repeat.

    Args:
        recorder: Recorder of the run.
        host_state: Returns what a batch may change on the host (random numbers, counters of modules).
    """

    def __init__(self, recorder: Recorder, host_state: Callable[[], Any]) -> None:
        self._recorder = recorder
        self._host_state = host_state
        self._calls = RepeatedCalls(recorder)
        self._before: Window | None = None
        self._template: Window | None = None
        self._open: tuple[Window, Any] | None = None
        self._inputs: Inputs | None = None

    def repeat(self, batch: Any) -> Any:
        """Write a copy of the template as this batch and return its outputs; None if it has to be executed."""
        self._inputs = describe(self._recorder, dict(batch))
        template = self._template
        if self._inputs is None or template is None or template.inputs.shapes != self._inputs.shapes:
            return None
        return self._calls.write_again(template, self._inputs, dict(batch))

    def begin(self) -> None:
        """Begin to follow a batch that is executed."""
        if self._inputs is None:
            return
        self._open = self._calls.begin(self._inputs), self._host_state()

    def end(self, outputs: Any) -> None:
        """End a batch that was executed: compare it with the one before."""
        opened, self._open, self._inputs = self._open, None, None
        if opened is None:
            return
        window, state = opened
        self._calls.end(window, outputs)
        unchanged = self._host_state() == state
        before, self._before = self._before, window if unchanged else None
        repeats = before is not None and window.recording is not None and window.did_as(before)
        if unchanged and repeats and self._calls.may_repeat(window):
            self._template = window


@contextlib.contextmanager
def arrays_without_data(recorder: Recorder, above: int = 0) -> Iterator[None]:
    """Let the Trainer's gathered outputs on the host have shapes but no data: they may be larger than this machine.

    Arrays of fewer elements than ``above`` are made as ever.  What is converted and joined there is written as
    operations of the CPU, with the bytes that it reads and writes.
    Source: ``nested_numpify`` and ``numpy_pad_and_concatenate`` (transformers/trainer_pt_utils.py, 5.0-5.17).
    """
    from transformers import trainer_pt_utils as of_trainer

    def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def work(name: str, moved: int) -> None:
        recorder.operations.write_one(f"numpy::{name}", (), (), {"bytes": moved}, (), len(recorder.trace.events))

    numpified, concatenated = of_trainer.nested_numpify, of_trainer.numpy_pad_and_concatenate

    def numpify(tensors: Any) -> Any:
        if isinstance(tensors, list | tuple):
            return type(tensors)(numpify(each) for each in tensors)
        if isinstance(tensors, dict):
            return type(tensors)({name: numpify(each) for name, each in tensors.items()})
        if tensors.numel() < above:
            return numpified(tensors)
        with contextlib.suppress(SimulationError):  # integers whose values nobody knows
            tensors.cpu()
        recorder.gathered.keep(int(tensors.nbytes) * (2 if tensors.dtype == torch.bfloat16 else 1))
        if tensors.dtype == torch.bfloat16:  # which NumPy does not have
            work("convert", 3 * tensors.nbytes)
            return zeros(tuple(tensors.shape), "float32")
        return zeros(tuple(tensors.shape), str(tensors.dtype).removeprefix("torch."))

    def concatenate(array1: Any, array2: Any, padding_index: int = -100) -> Any:
        one, other = np.shape(np.atleast_1d(array1)), np.shape(np.atleast_1d(array2))
        width = () if len(one) == 1 else (max(one[1], other[1]),)
        shape = (one[0] + other[0], *width, *one[2:])
        if prod(shape) < above:
            return concatenated(array1, array2, padding_index)
        joined = zeros(shape, array1.dtype)
        recorder.gathered.join(joined.nbytes)
        work("concatenate", np.atleast_1d(array1).nbytes + np.atleast_1d(array2).nbytes + joined.nbytes)
        return joined

    with (
        mock.patch.object(of_trainer, "nested_numpify", numpify),
        mock.patch.object(of_trainer, "numpy_pad_and_concatenate", concatenate),
    ):
        yield


_SAVERS = ("transformers.modeling_utils.safe_save_file", "safetensors.torch.save_file")
_LOADERS = ("transformers.trainer_utils.safe_load_file", "safetensors.torch.load_file")
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


@dataclass(frozen=True, slots=True)
class ExecutedRestoring:
    """A checkpoint that was loaded: the events of the trace, and the largest file or shard that was in host memory."""

    events: range
    host_bytes: int


class CheckpointFiles:
    """The files with tensors that a simulated training saves and loads.

    Attributes:
        host_bytes: Most that was copied to host memory at once to save a file.
        found_bytes: Largest file that was loaded of those that an earlier process saved.
        own_bytes: Largest file that was loaded of those that this process saved.
    """

    def __init__(self) -> None:
        self._process: SimulatedProcess | None = None
        self._own: dict[str, tuple[Any, int]] = {}
        self._found: dict[str, tuple[Any, int]] = {}
        self.host_bytes = self.found_bytes = self.own_bytes = 0

    def open(self, process: SimulatedProcess) -> None:
        """Begin a process, which finds what those before it saved."""
        self._process = process
        self._found |= self._own
        self._own = {}
        self.host_bytes = self.found_bytes = self.own_bytes = 0

    def moved(self, folder: Path, place: Path) -> None:
        """Note that a folder has become ``place``."""
        for path in [path for path in self._own if Path(path).is_relative_to(folder)]:
            self._own[str(place / Path(path).relative_to(folder))] = self._own.pop(path)

    def keep(self, value: Any, file: Any, size: int, *, at_once: bool) -> None:
        """Remember the value of a file that is saved.

        Args:
            value: Tensors in nested containers.
            file: Path of the file.
            size: Its size.
            at_once: Whether all tensors are copied to host memory before the first is written (safetensors 0.8,
                ``_flatten_as_ptr``), or one storage after the other (``torch.save``).
        """
        assert self._process is not None
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensors = [tensor for tensor in _tensors(value) if tensor.is_meta]
            gathered = self._process.topology.has_group  # whole tensors on the host are copies, all made by now
            is_copied = [gathered or self._process.storages.on_device(tensor) for tensor in tensors]
            storages = {
                storage_key(tensor): tensor for tensor, copied in zip(tensors, is_copied, strict=True) if copied
            }
            sizes = [int(tensor.untyped_storage().nbytes()) for tensor in storages.values()]
            self._own[str(file)] = tree_map(_Described.of, value), size
            at_once = at_once or not any(map(self._process.storages.on_device, tensors))
        self.host_bytes = max(self.host_bytes, sum(sizes) if at_once else max(sizes, default=0))

    def load(self, file: Any) -> Any:
        """Return the value of a file, with its tensors in host memory; None if no process saved it."""
        assert self._process is not None
        is_own = str(file) in self._own
        found = (self._own if is_own else self._found).get(str(file))
        if found is None:
            return None
        value, size = found
        if is_own:
            self.own_bytes = max(self.own_bytes, size)
        else:
            self.found_bytes = max(self.found_bytes, size)
        with self._process.on_host():
            return tree_map(lambda leaf: leaf.make() if isinstance(leaf, _Described) else leaf, value)


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor of a file: its layout, and its values where they are known."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Describe a tensor; return other values as they are."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return cls(leaf.shape, leaf.stride(), leaf.dtype, None if leaf.is_meta else leaf.detach().clone())

    def make(self) -> torch.Tensor:
        """Return a tensor like it."""
        if self.values is not None:
            return self.values.clone()
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@contextlib.contextmanager
def files_without_data(files: CheckpointFiles | None = None, *, safetensors: bool = True) -> Iterator[None]:
    """Let weights and states be saved as sparse files: sizes are right, and nothing is written.

    With ``files``, they can be loaded again.  Without ``safetensors``, only files of ``torch.save`` are.
    Tensors that share memory are recognised by their storage, as meta tensors have no address.  Source:
    ``id_tensor_storage`` (transformers/pytorch_utils.py), ``get_torch_storage_id`` (huggingface_hub).
    """
    original = torch.save

    def save(value: Any, file: Any, *arguments: Any, **keywords: Any) -> None:
        tensors = _tensors(value)
        if not isinstance(file, str | os.PathLike):
            with torch._C.DisableTorchFunction():
                is_described = bool(tensors) and tensors[0].is_meta
            if is_described:
                _skip(file, _saved_bytes(value, original))  # one of several tensors in a file of a sharded checkpoint
                if files is not None:
                    files.host_bytes = max(files.host_bytes, *(int(tensor.nbytes) for tensor in tensors))
            else:
                original(value, file, *arguments, **keywords)
            return
        if not tensors:
            original(value, file, *arguments, **keywords)
            return
        _write_sparse(file, size := _saved_bytes(value, original))
        if files is not None:
            files.keep(value, file, size, at_once=False)

    def save_safely(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
        _write_sparse(filename, size := safetensors_bytes(tensors, metadata))
        if files is not None:
            files.keep(dict(tensors), filename, size, at_once=True)

    def end_of(tensor: torch.Tensor) -> int:
        return tensor.data_ptr() + int(tensor.nbytes)  # one of several ranks has addresses

    patches = {} if files is None else _loaders(files)
    if safetensors:
        patches |= dict.fromkeys(_SAVERS, save_safely)
    if safetensors and "peft.peft_model" in sys.modules:
        patches["peft.peft_model.safe_save_file"] = save_safely
    patches |= {
        "torch.save": save,
        "torch.cuda.random.get_rng_state": _random_state,
        "transformers.modeling_utils.id_tensor_storage": _identity,
        "transformers.modeling_utils._end_ptr": end_of,
        "huggingface_hub.serialization._torch.get_torch_storage_id": _identity,
    }
    with contextlib.ExitStack() as stack:
        for place, replacement in patches.items():
            module, _, name = place.rpartition(".")
            stack.enter_context(mock.patch.object(import_module(module), name, replacement))
        yield


def _loaders(files: CheckpointFiles) -> dict[str, Any]:
    """Return what loads files that were saved, by the place of what it replaces."""
    original = torch.load

    def load(file: Any, *arguments: Any, **keywords: Any) -> Any:
        found = files.load(file)
        return original(file, *arguments, **keywords) if found is None else found

    def load_safely(filename: Any, device: Any = "cpu", **keywords: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in files.load(filename).items()}

    found: dict[str, Any] = {"torch.load": load, "torch.cuda.random.set_rng_state": lambda *arguments, **keywords: None}
    found |= dict.fromkeys(_LOADERS, load_safely)
    if "peft.peft_model" in sys.modules:
        found["peft.utils.save_and_load.safe_load_file"] = load_safely
    return found


def _random_state(device: Any = "cuda") -> torch.Tensor:
    """Return the state of a GPU's generator, which is on the host: its seed and its offset."""
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


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


def _skip(stream: Any, size: int) -> None:
    """Leave a hole in a file that is open (that of ``_write_item`` in torch/distributed/checkpoint/filesystem.py)."""
    file = getattr(stream, "raw", stream)
    file.seek(size, os.SEEK_CUR)
    file.truncate()
