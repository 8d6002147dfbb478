"""Dispatch mode that writes the allocation trace: it sees every aten operation below autograd.

Facts about an operator that the recorder needs in every call of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.plan import KernelCall, Rule
from trainatomy.operators.allocation.workspaces import TakenWorkspaces, Workspace, product_of
from trainatomy.operators.registry import find, libraries_of
from trainatomy.results.operations import CHOSEN_ROWS, SAME_ROW, Operations
from trainatomy.results.prediction import GroupUse
from trainatomy.simulator.adapters.torchvision import STAND_INS
from trainatomy.simulator.autograd import FreshZeros
from trainatomy.simulator.bounds import BOUNDED, INDEXES, check_range
from trainatomy.simulator.calls import check_types, has_types
from trainatomy.simulator.cards import Cards
from trainatomy.simulator.data_dependent import (
    LEARNS,
    READS,
    SIZED,
    DataDependentSizes,
    ScalarReads,
    dimension_of_choice,
)
from trainatomy.simulator.execution import MetaExecution, MixedDevices, has_host_tensor
from trainatomy.simulator.modules import ModuleTracker
from trainatomy.simulator.sparse_tensors import NAMES as SPARSE
from trainatomy.simulator.sparse_tensors import SparseOperators
from trainatomy.simulator.storages import GatheredArrays, Storages
from trainatomy.simulator.trace_writer import PlanWriter, TraceWriter
from trainatomy.simulator.values import CHOOSES, GUESSES, LIKE_FACTORIES, Values
from trainatomy.training.stored_weights import is_packed_type

if TYPE_CHECKING:
    from trainatomy.results.tasks import RestoringPurpose
    from trainatomy.simulator.evaluation import ExecutedEvaluation, ExecutedSaving
    from trainatomy.simulator.generation import ExecutedGeneration


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Facts that an operator's schema and its row in the table say.

    Attributes:
        func: The operator, which keeps its identity while the facts are kept.
        name: Its name, such as ``aten::addmm``.
        rule: Its allocation rule, if it has one.
        has_types: True if its CUDA kernel takes some types only.
        reads: True if it may read a value.
        sized: True if the size of its result may depend on values.
        learns: True if its result may be known to be False.
        bounds: True if it may be known how many elements of its result are true at most.
        indexes: True if it reads entries that one of its arguments names.
        chooses: True if its last result says which entries it picks along a dimension.
        guesses: True if a few unknown numbers may be taken to have been 0 before.
        is_functional: True if it writes to none of its arguments.
        loads: True if it loads libraries or takes workspaces.
        adds_rows: True if its time depends on how often an index occurs among those of its second argument.
        composite: True if PyTorch runs it as a sequence of other operators above autograd.
        may_be_sparse: True if it is run by dense operators where a tensor is sparse.
        resizes: True if it may give one of its arguments a larger storage: ``out=``, ``resize_``.
        uncounted: What it allocates besides that no rule counts.
        stand_in: What runs in its place, with the recorder as its first argument.
        kernel: Key of its kernel, where that calls other operators below autograd, on every device.
    """

    func: Any
    name: str
    rule: Rule | None
    has_types: bool
    reads: bool
    sized: bool
    learns: bool
    bounds: bool
    indexes: bool
    chooses: bool
    guesses: bool
    is_functional: bool
    loads: bool
    adds_rows: bool
    composite: bool
    may_be_sparse: bool
    resizes: bool
    uncounted: str
    stand_in: Callable[..., Any] | None
    kernel: torch._C.DispatchKey | None


_RESIZES = frozenset({"aten::resize_", "aten::resize_as_"})
_KERNELS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
"""Names of the keys under which PyTorch registers kernels for all devices (torchgen/model.py, ``DispatchKey``)."""
_ADDS_ROWS = frozenset(
    {"aten::embedding_dense_backward", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
)


def facts_of(func: Any, rules: dict[str, Rule]) -> OperatorFacts:
    """Look up the facts of an operator; ``rules``: allocation rules by the operator's name."""
    name = func._schema.name
    row = find(name)
    return OperatorFacts(
        func=func,
        name=name,
        rule=rules.get(name),
        has_types=has_types(func),
        reads=name in READS,
        sized=name in SIZED,
        learns=name in LEARNS,
        bounds=name in BOUNDED,
        indexes=name in INDEXES,
        chooses=name in CHOOSES and any(argument.name in ("dim", "num_samples") for argument in func._schema.arguments),
        guesses=name in GUESSES,
        is_functional=not func._schema.is_mutable and name not in LIKE_FACTORIES,
        loads=row is not None and bool(row.loads or row.workspaces),
        adds_rows=name in _ADDS_ROWS,
        composite=_has_kernel(func, "CompositeImplicitAutograd"),
        may_be_sparse=name in SPARSE,
        resizes=name in _RESIZES or any(argument.is_out for argument in func._schema.arguments),
        uncounted=row.uncounted if row is not None else "",
        stand_in=STAND_INS.get(name),
        kernel=_kernel(func) if row is not None and row.composite else None,
    )


def _kernel(func: Any) -> torch._C.DispatchKey | None:
    """Return the key of an operator's kernel for all devices."""
    return next((getattr(torch._C.DispatchKey, key) for key in _KERNELS if _has_kernel(func, key)), None)


def _has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


_DISABLED = torch._C.DisableTorchFunction
_NO_CONTEXT = contextlib.nullcontext()


class Recorder(TraceWriter, TorchDispatchMode):
    """Dispatch mode that writes the trace and the operations, and answers where Python reads a tensor's value.

    See ``TraceWriter`` for what it writes to.

    Attributes:
        weight_copies: Weights and their copies in 16 bits that autocast keeps, by the identity of the weight.
        values: Values of tensors that are known.
        scalar_reads: Answers where Python reads a value.
        mixed: Runs or refuses operations on tensors of the host and of the GPU.
        execution: Runs operations on meta tensors.
        uncounted: What operators allocate besides that no rule counts, by the operator.
        host_draws: Generators of the host ("torch", "random", "numpy") that decide what a forward pass allocates.
        unseeded: Those of these generators that differ from run to run, as nobody seeds them.
        libraries: Names of the CUDA libraries that were loaded so far.
        stack_bytes: Largest stack of a kernel so far, for each thread.
        python_adds: True while Python code adds tensors, which the autograd engine's accumulation must not be taken
            for.
        scalars_on_host: True while an assignment converts a number, which CUDA keeps on the host.
        has_packed: True while tensors of torchao may come, which run operations on the tensors inside them.
        communicates: True for one rank of several.
        transfers: Number of collectives, and of copies to other GPUs, so far.
        evaluation: Last evaluation of the training.
        gathered: Arrays on the host with the outputs of evaluations.
        generation: Last call of ``generate()``.
        saving: Last checkpoint that was saved.
        step_before: Operations of the last step but one, where the observer keeps them.
        restored: Events in which checkpoints were loaded.
        largest_read: Bytes of the largest tensor that was read from a sharded checkpoint.
        too_long_transcript: Labels and frames of a sample for which the loss of CTC is infinite.
        cards: The GPU, and others that the execution serves.
        captures: True while operations become part of a CUDA graph instead of running.
        overwritten: What PyTorch says of storages whose memory a CUDA graph has taken for other tensors, by their keys.
        functions: Where it is a list, the operators that run and the values that Python reads are appended to it.
    """

    communicates = False
    groups: Mapping[tuple[int, ...], set[GroupUse]] = MappingProxyType({})
    group_names: Mapping[tuple[int, ...], set[str]] = MappingProxyType({})

    def __init__(
        self,
        storages: Storages,
        modules: ModuleTracker,
        rules: dict[str, Rule],
        cards: Cards,
        workspaces: TakenWorkspaces,
        device: torch.device,
    ) -> None:
        TorchDispatchMode.__init__(self)
        TraceWriter.__init__(self, storages, modules, device)
        self.transfers = 0
        self.python_adds = False
        self.scalars_on_host = False
        self.has_packed = False
        self.functions: list[Any] | None = None
        self.cards = cards
        self.evaluation: ExecutedEvaluation | None = None
        self.gathered = GatheredArrays()
        self.generation: ExecutedGeneration | None = None
        self.saving: ExecutedSaving | None = None
        self.step_before: Operations | None = None
        self.restored: dict[RestoringPurpose, range] = {}
        self.largest_read = 0
        self.weight_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.values = Values()
        self.scalar_reads = ScalarReads(self.values)
        self.mixed = MixedDevices(storages, self.scalar_reads)
        self.execution = MetaExecution(self.values, modules)
        self.uncounted: dict[str, str] = {}
        self.too_long_transcript: tuple[int, int] | None = None
        self.host_draws: set[str] = set()
        self.unseeded: set[str] = set()
        self.libraries: set[str] = set()
        self.stack_bytes = 0
        self._storages = storages
        self._rules = rules
        self._facts: dict[int, OperatorFacts] = {}  # by the operator's identity, as hashing one is slow
        self._workspaces = workspaces
        self._kept_workspaces: list[int] = []
        self.overwritten: dict[int, str] = {}
        self.captures = False
        self._plans = PlanWriter(self.trace, self.allocate, self.release, self.hold)
        self._zeros = FreshZeros()
        self.sizes = DataDependentSizes(self.values)
        self.sparse = SparseOperators(self.values, self.sizes)
        self._taken_over = False
        self._in_kernel = False

    @property
    def loaded(self) -> frozenset[str]:
        """The libraries that were loaded, with PyTorch's streams; those of several ranks are in what NCCL holds."""
        return frozenset(self.libraries | ({"streams"} if self.streams.pooled and not self.communicates else set()))

    @property
    def is_alone(self) -> bool:
        """True while the run has used one stream of one process: what several do is not compared."""
        return not (self.communicates or self.streams.uses or self.trace.stream_uses)

    @property
    def exchanges(self) -> tuple[int, ...]:
        """How often the run worked with other ranks, between streams, or on wrappers of parallel training so far.

        What does so is not compared with anything, and not copied.
        """
        trace, operations = self.trace, self.operations
        waits = operations.operations.dependencies, operations.operations.cpu_waits
        noted: Sequence[Sized] = (trace.stream_uses, trace.cpu_waits, trace.pinned, self._labels_at_end, *waits)
        return self.transfers, operations.wrapped, self.streams.uses, *map(len, noted)

    @property
    def awaits(self) -> bool:
        """True if the next operations that are written have to wait for others."""
        return self.operations.awaits

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled; the wrapper that keeps dynamo out costs time in every operation."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiler does not see this mode; what runs its code does (see ``compiled``)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.has_packed and any(map(is_packed_type, types)):
            return NotImplemented  # the subclass runs the operation on its tensors, which comes back here
        kwargs = kwargs or {}
        facts = self._look_up(func)
        if facts.composite and (self._in_kernel or torch.is_inference_mode_enabled()):
            with self:  # autograd, which would have divided it, is out of the way
                return func.decompose(*args, **kwargs)
        if facts.kernel is not None:
            return self._run_kernel(facts.kernel, func, args, kwargs)
        if facts.stand_in is not None and args[0].is_meta:
            with self:
                return facts.stand_in(self, *args, **kwargs)
        if facts.may_be_sparse:
            with _DISABLED():
                if (run := self.sparse.find(facts.name, args)) is not None:
                    with self:
                        return run(*args, **kwargs)
        with _DISABLED():
            if self.overwritten:
                self._refuse_overwritten(func, args)
            name = facts.name
            event, self._taken_over = len(self.trace.events), False
            if self.trace.stream_uses and (facts.reads or facts.sized):
                self._waits.read(self.streams.executing.stream_id, event)
            result = self.scalar_reads.answer(name, args) if facts.reads else None
            if self.functions is not None:
                self.functions.append(func if result is None else (func, result))
            if facts.has_types and result is None:
                check_types(name, func, args, kwargs)
            if facts.indexes:
                check_range(name, args, self.values)
            written = self.mixed.run(name, func, args, kwargs) if has_host_tensor(args) else None
            if self.mixed.checks_weights:
                self.mixed.check(name, args)
            if result is None and facts.sized:
                result = self.sizes.run(name, func, args, kwargs)
            before = self._sizes(args, kwargs) if facts.resizes else {}
            if written is not None:
                result = written.result
            elif result is None:
                result = self.execution.run(name, func, args, kwargs)
            for storage, size in before.items():
                if storage.nbytes() > size:
                    self.grow(storage, name)
            self._modules.operation()
            self.streams.operation()
            outputs = _tensors(result)
            adds = name == "aten::add" and bool(outputs) and self._adds_gradients(args, outputs[0])
            with self.streams.consumer() if adds else _NO_CONTEXT:
                if adds or self.streams.of_node is not None:
                    self._use_gradients(args)
                if outputs:
                    self._note_results(facts, func, args, kwargs, outputs, adds)
                if self.operations.recording:
                    rows = self._rows(args) if facts.adds_rows else None
                    self.operations.write(func, args, kwargs, result, event, self._taken_over, rows=rows)
        return result

    def _rows(self, args: tuple[Any, ...]) -> tuple[str, str] | None:
        """Return what is known of the rows to which ``embedding_dense_backward`` or ``index_put`` adds."""
        if isinstance(args[1], torch.Tensor):
            return SAME_ROW if self.values.is_uniform(args[1]) else None
        accumulates = len(args) > 3 and bool(args[3])
        if not accumulates or len(args[1]) != 1 or args[1][0] is None:
            return None
        indices = args[1][0]
        if indices.numel() > 1 and self.values.is_uniform(indices):
            return SAME_ROW
        return CHOSEN_ROWS if self.values.are_choices(indices, args[0].shape[0]) else None

    def _run_kernel(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel that calls other operators, which are recorded in its place."""
        before, self._in_kernel = self._in_kernel, True
        try:
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._in_kernel = before

    def _sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[torch.UntypedStorage, int]:
        """Return the bytes of the storages on the GPU among the arguments."""
        storages = [tensor.untyped_storage() for tensor in _tensors([*args, *kwargs.values()])]
        return {one: one.nbytes() for one in storages if self.ledger.number_at(one._cdata) is not None}

    def _look_up(self, func: Any) -> OperatorFacts:
        """Return the facts of an operator, which are looked up when it runs for the first time."""
        facts = self._facts.get(id(func))
        if facts is None:
            facts = self._facts[id(func)] = facts_of(func, self._rules)
        return facts

    def _note_results(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        adds: bool,
    ) -> None:
        """Learn what is known of the results, and write what the operation allocates, by its rule if it has one."""
        name, first = facts.name, outputs[0]
        if facts.uncounted:
            self.uncounted[name] = facts.uncounted
        if facts.learns:
            self.scalar_reads.learn(name, args, outputs)
        if facts.bounds and first.is_meta:
            self.sizes.bounds.learn(name, args, first)
        learnt = facts.sized and facts.is_functional and self.values.knows(first)  # by what decided its size
        if not learnt and not (facts.is_functional and self.values.starts_unknown(args)):
            self.values.follow(func, args, kwargs, outputs)
        if facts.chooses and (dim := dimension_of_choice(name, args)) is not None:
            self.values.choose(args[0], dim, outputs[-1])
        if facts.guesses and first.is_meta and args[0].is_meta:
            self.values.guess(func, args, kwargs, first)
        if self._stays_on_host(name, args, outputs):
            self._storages.mark_host(outputs)
            return
        if (
            adds
            and self._references.adds_in_place(args[0], self.number_of(args[0]))
            and self._take_over(args[0], first)
        ):
            return
        self._zeros.follow(name, args, first, self._take_over)
        workspaces = self._use_libraries(product_of(name, args)) if facts.loads else []
        passing = [each for each in workspaces if not each.is_kept]
        if facts.rule is None:
            self._plans.write((), name, outputs, passing)
        else:
            selected = self.sizes.selected if facts.sized else ()
            call = KernelCall(func, args, kwargs, tuple(outputs), self.cards.processor, selected, self.captures)
            self._plans.write(self.cards.plan(facts.rule, call), name, outputs, passing)
        for workspace in workspaces:
            if workspace.is_kept:
                number = self.allocate(workspace.bytes, workspace.name)
                self.trace.labels[number] = workspace.name
                self._kept_workspaces.append(number)

    def clear_workspaces(self) -> None:
        """Release the workspaces of cuBLAS (``torch._C._cuda_clearCublasWorkspaces``)."""
        for number in self._kept_workspaces:
            self.release(number)
        self._kept_workspaces.clear()
        self._workspaces.clear()

    def _refuse_overwritten(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse to read or write a tensor whose memory a CUDA graph has taken for other tensors, as PyTorch does."""
        for tensor in () if func.is_view else _tensors(args):
            if (message := self.overwritten.get(tensor.untyped_storage()._cdata)) is not None:
                raise SimulationError(
                    f"PyTorch stops this training, which runs CUDA graphs, at {func.name()}:\n{message}\n"
                    "Compile without CUDA graphs: torch_compile_mode: default, or max-autotune-no-cudagraphs"
                )

    def _use_libraries(self, name: str) -> list[Workspace]:
        """Load the libraries of an operation, and return the workspaces that they take before the kernel."""
        in_backward = torch._C._current_graph_task_id() != -1
        self.libraries.update(libraries_of(name, in_backward))
        return self._workspaces(name, in_backward, self.streams.executing.stream_id)

    def _adds_gradients(self, args: tuple[Any, ...], output: torch.Tensor) -> bool:
        """Return whether an addition is the engine's, of two gradients of one tensor."""
        if torch._C._current_graph_task_id() == -1 or self.python_adds or torch.is_grad_enabled():
            return False
        first = args[0]
        return (
            len(args) == 2
            and isinstance(args[1], torch.Tensor)
            and first.shape == output.shape
            and first.dtype == output.dtype
        )

    def _use_gradients(self, args: tuple[Any, ...]) -> None:
        """Note that the stream of an autograd node uses gradients of other streams.

        The engine calls ``record_stream`` of each (torch/csrc/autograd/input_buffer.cpp, torch 2.9-2.13).
        """
        stream = self.streams.executing
        for tensor in _tensors(args):
            number = self.number_of(tensor)
            if number is None or number < 0 or self.trace.origins[number].phase != "backward":
                continue
            if self._side_streams.get(number, 0) != stream.stream_id:
                self.use_on_stream(tensor, stream)

    def _take_over(self, source: torch.Tensor, output: torch.Tensor) -> bool:
        """Give the memory of ``source`` to the output: CUDA writes in place where a dispatch mode does not."""
        number = self.ledger.take(source.untyped_storage())
        if number is None:
            return False
        self.ledger.assign(output.untyped_storage(), number)
        self._taken_over = True
        return True

    def _stays_on_host(self, name: str, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> bool:
        """Return whether results lie in host memory: those of tensors that all do, and what is written to one there."""
        if self.stage == "host" or (self.scalars_on_host and name == "aten::scalar_tensor"):
            return True
        if not self._storages.any_on_host():
            return False
        if outputs and not self._storages.on_device(outputs[0]):
            return True
        sources = [t for t in _tensors(args) if t.is_meta]
        return bool(sources) and not any(self._storages.on_device(t) for t in sources)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the meta tensors with a storage of their own; a sparse one consists of tensors that were seen already."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_meta and value.layout == torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
