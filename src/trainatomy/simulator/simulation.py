"""What executing a training returns: on one GPU, and for every GPU on which it does the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.gpus import GPU
from trainatomy.results.host import HostPhaseName, KeptOnHost
from trainatomy.results.operations import Operations
from trainatomy.results.trace import AllocationTrace
from trainatomy.simulator.cards import Card, card_of, sizes_on, trace_on
from trainatomy.simulator.notes import Note, notes_of
from trainatomy.simulator.steps import with_further_steps, with_skipped_steps
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.results.prediction import Communicators
    from trainatomy.results.tasks import Experts, RestoringPurpose
    from trainatomy.simulator.evaluation import ExecutedEvaluation, ExecutedRestoring, ExecutedSaving
    from trainatomy.simulator.generation import ExecutedGeneration


@dataclass(frozen=True, slots=True)
class HostUse:
    """What an execution found of the host's memory, in bytes, for each process.

    Attributes:
        weights: Parameters and buffers of the whole model, as it is built.
        stored: Bytes of the files that they are loaded from.
        is_built: Whether a function of the user's makes the model in memory; otherwise it is loaded from files.
        batch: The tensors of a batch; empty where they are not known.
        pinned: Pinned blocks that hold activations.
        pageable: Other memory that holds activations.
        kept: What tensors take besides activations and batches, by phase: shards, gradients and states that are
            offloaded.
        gathered: Arrays with the outputs of an evaluation, at their largest together.
        paged: Optimizer states in managed memory, which lie on the GPU as long as it has room.
        on_drive: What is offloaded to files on a drive.
    """

    weights: int
    stored: int
    is_built: bool
    batch: tuple[int, ...] = ()
    pinned: int = 0
    pageable: int = 0
    kept: Mapping[HostPhaseName, KeptOnHost] = field(default_factory=dict)
    gathered: int = 0
    paged: int = 0
    on_drive: int = 0


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of executing a workload's steps.

    Attributes:
        trace: Allocations of the run.
        parameters: Number of parameters of the model.
        trainable_parameters: Number of those that are trained.
        steps: Optimizer steps that were executed.
        torch_version: Version of PyTorch that was simulated.
        libraries: Names of the libraries loaded into the GPU's context (see ``catalog.gpus.Context``).
        notes: Sentences about the description for the reader.
        stack_bytes: Largest stack of a kernel, for each thread; 0: none is known to need one.
        operations: Operations of the last step.
        operations_between: Operations of a step that does not generate, where only every so many steps do (GRPO).
        tokens_per_sample: Tokens that the model reads for each sample, None where it reads none.
        communicators: What this process did with each communicator, by its ranks.
        communicator_copies: Number of communicators by these ranks, where there are several.
        evaluation: The last evaluation of the training.
        layers: Number of layers that a pipeline divides; 0 without one.
        generation: The last call of ``generate()``.
        saving: The last checkpoint that was saved.
        restored: Checkpoints that were loaded, by the reason.
        host_bytes_of_saving: Most that was copied to host memory at once to save it.
        experts: The experts of a mixture of experts.
        cudnn: Version of cuDNN's library that chose for convolutions; None: rules did.
        trials: Convolutions for which cuDNN tries all its algorithms (``cudnn.benchmark``).
        models: Classes of the models that were executed.
        attention: transformers' name of the attention of a model that has any.
        input_shapes: Shape of each input of a sample, by the name of the model's argument; empty if it is not known.
        stored_quantization: How the weights of the checkpoint are quantised, if they are loaded so.
        loop: Name of a loop that is not the workload's: that of a script.
        host: What the execution found of the host's memory.
    """

    trace: AllocationTrace
    parameters: int
    trainable_parameters: int
    steps: int
    torch_version: tuple[int, int]
    libraries: frozenset[str]
    notes: tuple[str, ...]
    stack_bytes: int = 0
    operations: Operations = field(default_factory=Operations)
    tokens_per_sample: int | None = None
    weights_dtype: str = "float32"
    communicators: Communicators = field(default_factory=dict)
    communicator_copies: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    evaluation: ExecutedEvaluation | None = None
    layers: int = 0
    generation: ExecutedGeneration | None = None
    saving: ExecutedSaving | None = None
    restored: Mapping[RestoringPurpose, ExecutedRestoring] = field(default_factory=dict)
    host_bytes_of_saving: int = 0
    experts: Experts | None = None
    cudnn: str | None = None
    trials: int = 0
    operations_between: Operations | None = None
    models: tuple[str, ...] = ()
    attention: str | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stored_quantization: str | None = None
    loop: str | None = None
    host: HostUse | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """An executed training, which serves every GPU on which it does the same.

    Attributes:
        own: The GPU that was executed.
        others: Others that it serves.
        heard: Settings of the allocator whose counters the training read; None: it read none.
        goes_on: Whether its last step may be repeated, as far as the peaks need it.
        trace: Allocations, whose sizes may differ between these GPUs.
        notes: See ``Simulation``; with those that depend on the GPU.
        simulation: All the rest.
        finished: The trace that was asked for last, by what it depends on: GPUs may have the same.
    """

    own: Card
    others: frozenset[Card]
    heard: AllocatorSettings | None
    goes_on: bool
    trace: AllocationTrace
    notes: tuple[Note, ...]
    simulation: Simulation
    finished: dict[Hashable, AllocationTrace] = field(default_factory=dict, compare=False, repr=False)

    def serves(self, gpu: GPU) -> bool:
        """Return whether the training does the same on a GPU."""
        card = card_of(gpu)
        return card == self.own or card in self.others

    def on(self, workload: Workload, gpu: GPU) -> Simulation | None:
        """Return the simulation of the training on a GPU and with its allocator's settings; None: it is not served."""
        settings = AllocatorSettings.parse(workload.allocator, self.simulation.torch_version)
        if not self.serves(gpu) or self.heard not in (None, settings):
            return None
        key = settings, workload.skipped_steps, sizes_on(self.trace, card_of(gpu))
        if key not in self.finished:
            self.finished.clear()
            self.finished[key] = self._finish(workload, gpu, settings)
        return replace(self.simulation, trace=self.finished[key], notes=tuple(notes_of(self.notes, workload)))

    def _finish(self, workload: Workload, gpu: GPU, settings: AllocatorSettings) -> AllocationTrace:
        """Return the trace on a GPU, with steps that are written without being executed."""
        trace = trace_on(self.trace, card_of(gpu))
        trace = with_skipped_steps(trace, workload.skipped_steps, after=int(self.goes_on))
        return with_further_steps(trace, settings) if self.goes_on else trace
