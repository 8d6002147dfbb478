"""CUDA graphs of a simulated process: what is captured, their memory pools, and tensors that lie in these.

PyTorch's Python decides what becomes a graph and when one is replayed (torch/_inductor/cudagraph_trees.py).  Here are
the functions in C++ that it calls, over the simulated allocator:

- While a graph is captured, and while a function warms up, allocations come from a private pool, whose blocks nothing
  else gets.  A replay allocates nothing: its results are tensors at the addresses that they had in the capture.
- The state of a pool is kept after each capture and put back before the next one that follows a replay.
- What a capture launches is launched again by each replay, as one launch of the CPU.

Source: torch 2.11-2.13, torch/csrc/cuda/Module.cpp, aten/src/ATen/cuda/CUDAGraph.cpp and CUDAGeneratorImpl.cpp,
c10/cuda/CUDACachingAllocator.cpp (``beginAllocateToPool``, ``setCheckpointPoolState``).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainatomy.catalog.versions import behaviour
from trainatomy.results.trace import Event, pool_of
from trainatomy.simulator.operations import Captured
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.storages import storage_of
from trainatomy.simulator.trace_writer import NO_ALLOCATION
from trainatomy.units import human_bytes

PoolID = tuple[int, int]


class PoolState(NamedTuple):
    """The live allocations of a private pool at one moment, as the events that made them."""

    pool: PoolID
    made: tuple[Event, ...]


class _Seen(TorchDispatchMode):
    """Notes whether operators run, and whether one draws random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.any = self.draws = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.any = True
        self.draws = self.draws or (torch.Tag.nondeterministic_seeded in func.tags and _drops(func, args, kwargs))
        return func(*args, **kwargs)


def _drops(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return False for attention without dropout, which draws nothing."""
    names = [argument.name for argument in func._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(values.get("dropout_p"))


class CUDAGraphs:
    """The CUDA graphs of a simulated process.

    Attributes:
        captured: Number of graphs that were captured.
        replayed: Whether one was replayed after its recording, which replays it at once.
        skipped: Why Inductor did not capture something, in its words.
    """

    def __init__(self, process: SimulatedProcess) -> None:
        self.captured, self.replayed = 0, False
        self.skipped: list[str] = []
        self._warnings: list[str] = []
        self.process = process
        self._addresses: dict[int, tuple[int, object]] = {}  # of storages that were made at an address, by their keys
        self._watched: dict[int, Any] = {}  # storages whose memory others have, by their keys
        self._pools = 0
        self._registers = behaviour("cuda_graphs_register_the_default_generator", process.processor.torch_version)
        self._states: dict[int, tuple[object, list[torch.Tensor]]] = {}

    @contextlib.contextmanager
    def installed(self) -> Any:
        """Open a context in which PyTorch's functions for CUDA graphs are those of the simulated process."""
        graphs = self

        class CUDAGraph(SimulatedCUDAGraph):
            owner = graphs

        with contextlib.ExitStack() as stack:
            for name, function in self._functions().items():
                stack.enter_context(mock.patch.object(torch._C, name, function, create=True))
            trees: Any = import_module("torch._inductor.cudagraph_trees")
            stack.enter_context(mock.patch.object(trees, "log_cudagraph_skip_and_bump_counter", self.skipped.append))
            stack.enter_context(mock.patch.object(warnings, "warn", self._warn))
            stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", CUDAGraph))
            stack.enter_context(mock.patch.object(torch.cuda, "graph_pool_handle", self._new_pool))
            stack.enter_context(mock.patch.object(torch.cuda, "memory_snapshot", self._snapshot))
            stack.enter_context(mock.patch.object(torch, "_foreach_copy_", _copy_all(torch._foreach_copy_)))
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", self._storage_address()))
            stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", self._tensor_address()))
            # Autograd's node of the function runs on the stream that is current outside.
            stack.enter_context(mock.patch.object(self.process.recorder.streams, "makes_nodes", False))
            yield

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """Return what takes the place of functions of ``torch._C``."""
        return {
            "_cuda_beginAllocateCurrentThreadToPool": lambda device, pool: self.begin(pool),
            "_cuda_endAllocateToPool": lambda device, pool: self.end(),
            "_cuda_releasePool": lambda device, pool: None,
            "_cuda_getCheckpointState": lambda device, pool: self._state_of(pool),
            "_cuda_setCheckpointPoolState": self._restore,
            "_cuda_cudaCachingAllocator_raw_delete": self._delete,
            "_cuda_checkPoolLiveAllocations": self._holds,
            "_cuda_clearCublasWorkspaces": self.process.recorder.clear_workspaces,
            "_cuda_get_conv_benchmark_empty_cache": lambda: True,
            "_cudnn_set_conv_benchmark_empty_cache": lambda empties: None,
            "_cuda_isHistoryEnabled": lambda: False,
            "_host_emptyCache": lambda: None,
            "_construct_storage_from_data_pointer": lambda address, device, size: self._storage_at(address, size),
            "_construct_CUDA_Tensor_From_Storage_And_Metadata": self._tensor_in,
            "_free_And_Remove_DeleterFn": self._release,
            "_has_Standard_Deleter": lambda key: True,
            "_set_storage_access_error_msg": lambda tensor, text: self._overwritten(storage_of(tensor)._cdata, text),
            "_set_storage_data_ptr_access_error_msg": self._overwritten,
            "_tensors_data_ptrs_at_indices_equal": self._lie_at,
        }

    def notes(self) -> list[str]:
        """Return notes on graphs, and on what Inductor made none of."""
        reasons = dict.fromkeys(reason.partition(". Found from")[0].splitlines()[0] for reason in self.skipped)
        said = [f"Inductor runs a part of the step without CUDA graphs: {reason}" for reason in reasons]
        said += [f"PyTorch warns: {message}" for message in dict.fromkeys(self._warnings)]
        if not self.captured:
            return said
        reserved = human_bytes(self.process.counters.private_bytes())
        found = [
            f"CUDA graphs: {self.captured} are recorded when their functions run for the second time; the first time "
            f"these run as they are. Both take memory from a pool of their own, {reserved} of reserved memory that "
            "nothing else can use and that is never given back. A replay allocates nothing: "
            "torch.cuda.memory_allocated() no longer counts what graphs hold",
            "the CPU's time to replay a CUDA graph is an estimate (two trainings on an H200)",
            *said,
        ]
        if not self.replayed:
            found.append("no CUDA graph is replayed in the steps that were executed, whose time is that without one")
        return found

    def _warn(self, message: Any, *_: Any, **__: Any) -> None:
        self._warnings.append(str(message))

    # -- pools ---------------------------------------------------------------------------------------------------------

    def _new_pool(self) -> PoolID:
        self._pools += 1
        return 0, self._pools

    def begin(self, pool: PoolID) -> None:
        """Allocate from a pool, until ``end``."""
        self.process.recorder.pool = pool[1]

    def end(self) -> None:
        """Allocate outside of pools."""
        self.process.recorder.pool = 0

    def _live_in(self, pool: PoolID) -> list[Event]:
        in_pools = self.process.recorder.in_pools
        return [made for made in in_pools.values() if pool_of(made.stream) == pool[1]]

    def _state_of(self, pool: PoolID) -> PoolState:
        made = tuple(self._live_in(pool))
        for event in made:
            self.process.counters.remember(event.allocation)
        return PoolState(pool, made)

    def _restore(self, device: int, state: PoolState, stale: list[int], live: list[int]) -> None:
        """Put the live allocations of a pool back, and let those storages own theirs that live."""
        recorder, counters = self.process.recorder, self.process.counters
        for made in self._live_in(state.pool):
            recorder.ledger.disown(made.allocation)
            recorder.release(made.allocation)
        numbers = {counters.address(number): number for number in map(recorder.allocate_again, state.made)}
        for key in live:
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            number = None if storage is None else numbers.get(storage.data_ptr())
            if storage is not None and number is not None:
                self._addresses.pop(key, None)
                recorder.ledger.assign(storage, number)

    def _delete(self, address: int) -> None:
        """Release the allocation at an address."""
        recorder, counters = self.process.recorder, self.process.counters
        number = next(number for number in recorder.in_pools if counters.address(number) == address)
        recorder.ledger.disown(number)
        recorder.release(number)

    def _holds(self, device: int, pool: PoolID, addresses: Collection[int]) -> bool:
        """Return whether exactly these addresses are allocated in a pool."""
        counters = self.process.counters
        return {counters.address(made.allocation) for made in self._live_in(pool)} == set(addresses)

    def _snapshot(self) -> list[dict[str, Any]]:
        """Return what ``check_memory_pool`` reads of the segments of pools: the addresses that are allocated."""
        blocks, counters = [{"state": "active_allocated", "size": 0, "frames": []}], self.process.counters
        return [
            {"segment_pool_id": (0, pool_of(made.stream)), "address": counters.address(number), "blocks": blocks}
            for number, made in self.process.recorder.in_pools.items()
        ]

    # -- addresses -----------------------------------------------------------------------------------------------------

    def _address_of(self, key: int) -> int | None:
        """Return the address of the memory of a storage on the GPU; None for another one."""
        if key in self._addresses:
            return self._addresses[key][0]
        number = self.process.recorder.ledger.number_at(key)
        if number is None:
            return None
        return 0 if number == NO_ALLOCATION else self.process.counters.address(number)

    def _storage_address(self) -> Callable[[torch.UntypedStorage], int]:
        address = torch.UntypedStorage.data_ptr

        def data_ptr(storage: torch.UntypedStorage) -> int:
            found = self._address_of(storage._cdata)
            return address(storage) if found is None else found

        return data_ptr

    def _tensor_address(self) -> Callable[[torch.Tensor], int]:
        address = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            with torch._C.DisableTorchFunction():
                found = self._address_of(tensor.untyped_storage()._cdata) if tensor.is_meta else None
                return address(tensor) if found is None else found + int(tensor.storage_offset()) * tensor.itemsize

        return data_ptr

    def _lie_at(self, tensors: Sequence[Any], addresses: Sequence[int | None], places: Sequence[int]) -> bool:
        return all(tensors[place].data_ptr() == addresses[place] for place in places)

    def _storage_at(self, address: int, size: int) -> torch.UntypedStorage:
        """Return a storage at an address, which it does not own."""
        storage = torch.UntypedStorage(size, device="meta")
        self._addresses[storage._cdata] = address, _watch(storage, self._addresses)
        self.process.recorder.ledger.assign(storage, NO_ALLOCATION)
        return storage

    def _tensor_in(self, metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor in a storage."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            tensor = torch.empty(0, dtype=metadata["dtype"], device="meta")
            place = metadata["storage_offset"], metadata["size"], metadata["stride"]
            return tensor.set_(storage, *place)

    def _release(self, key: int) -> None:
        """Release the memory of a storage that lives."""
        storage, recorder = torch.UntypedStorage._new_with_weak_ptr(key), self.process.recorder
        number = None if storage is None else recorder.ledger.take(storage)
        if storage is not None and number is not None:
            recorder.ledger.assign(storage, NO_ALLOCATION)
            recorder.release(number)

    def _overwritten(self, key: int, text: str) -> None:
        """Note what PyTorch says when the memory of a storage is read."""
        storage, table = torch.UntypedStorage._new_with_weak_ptr(key), self.process.recorder.overwritten
        if storage is not None:
            table[key] = text
            self._watched[key] = _watch(storage, table, self._watched)

    # -- random numbers ------------------------------------------------------------------------------------------------

    def random_state(self, of: object) -> list[torch.Tensor]:
        """Return the seed and the offset on the GPU from which the graphs of a generator, or one graph, draw."""
        if id(of) not in self._states:
            made = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]
            self._states[id(of)] = of, made
        return self._states[id(of)][1]

    @property
    def registers_generator(self) -> bool:
        """True if every graph keeps the state of the default generator, whether it draws or not."""
        return bool(self._registers)


def _copy_all(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch._foreach_copy_``, which copies tensors one by one where their types differ.

    Source: aten/src/ATen/native/ForeachUtils.h (``can_use_fast_route``).
    """

    def copied(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        if len({tensor.dtype for tensor in (*targets, *sources)}) == 1:
            return copy(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return None

    return copied


def _watch(storage: torch.UntypedStorage, *tables: dict[int, Any]) -> weakref.ref[torch.UntypedStorage]:
    """Return a reference to a storage, with whose death tables forget its key."""
    key = storage._cdata

    def forget(_: object) -> None:
        for table in tables:
            table.pop(key, None)

    return weakref.ref(storage, forget)


class SimulatedCUDAGraph:
    """``torch.cuda.CUDAGraph``; ``owner`` is an attribute of a subclass."""

    owner: CUDAGraphs

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: PoolID = (0, 0)
        self._generators: list[Any] = []
        self._captured: Captured | None = None
        self._seen = _Seen()
        self._is_replayed = False

    def register_generator_state(self, generator: Any) -> None:
        """Draw from a generator in the graph, too."""
        self._generators.append(generator)

    def capture_begin(self, pool: PoolID | None = None, capture_error_mode: str = "global", **options: Any) -> None:
        """Capture what is launched until ``capture_end``."""
        owner = self.owner
        if owner.registers_generator:
            self._generators.insert(0, owner)
            self._fill_states()
        self._pool = pool or owner._new_pool()
        owner.begin(self._pool)
        owner.process.recorder.captures = True
        owner.process.recorder.operations.begin_capture()
        self._seen.__enter__()

    def capture_end(self) -> None:
        """End the capture."""
        self._seen.__exit__(None, None, None)
        recorder = self.owner.process.recorder
        self._captured = recorder.operations.end_capture()
        self.owner.captured += self._seen.any
        recorder.captures = False
        self.owner.end()
        if not self.owner.registers_generator and self._seen.draws:
            with torch.cuda.stream(torch.cuda.default_stream()):
                self.owner.random_state(self)
            self._generators = [self]

    def replay(self) -> None:
        """Launch what was captured."""
        self.owner.replayed |= self._is_replayed
        self._is_replayed = True
        if self._seen.draws:
            self._fill_states()
        if self._captured is not None:
            self.owner.process.recorder.operations.launch(self._captured)

    def _fill_states(self) -> None:
        """Write the seeds and offsets on the GPU."""
        for generator in self._generators:
            for number in self.owner.random_state(generator):
                number.fill_(0)

    def pool(self) -> PoolID:
        """Return its memory pool."""
        return self._pool

    def reset(self) -> None:
        """Forget what was captured."""
        self._captured = None
