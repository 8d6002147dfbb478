"""The value that a simulation returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainatomy.results.operations import Operations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainatomy.results.checkpoint import RestoringPurpose
    from trainatomy.results.experts import Experts
    from trainatomy.results.plan import Communicators
    from trainatomy.results.trace import AllocationTrace
    from trainatomy.simulator.evaluation import ExecutedEvaluation
    from trainatomy.simulator.generation import ExecutedGeneration
    from trainatomy.simulator.saving import ExecutedRestoring, ExecutedSaving


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
