"""Observer of a script's loop in a simulated process: labels tensors, and writes the operations of the last step.

It is to a script what ``simulator.watcher.Watcher`` is to a workload, for any number of models and optimizers, which it
gets to know one by one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainatomy.errors import SimulationError
from trainatomy.results.operations import Operations
from trainatomy.results.script import TaskKind, TrainedModel, UsedOptimizer
from trainatomy.results.trace import Mark
from trainatomy.scripts.job import current_place
from trainatomy.scripts.longest import LongestSample, SampleCounter, batch_tensors
from trainatomy.scripts.signals import ScriptListener
from trainatomy.scripts.standins.device_maps import has_gpu_hooks
from trainatomy.simulator.description import attention_of
from trainatomy.simulator.parallel.recorder import local
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.storages import storage_of
from trainatomy.simulator.watcher import PhaseMarker
from trainatomy.training.optimizer import tensors_in
from trainatomy.training.parallel.deepspeed import part_of
from trainatomy.training.quantization import parameter_count, quantization_of, scales

_ON_THE_GPU = (
    "A dry run predicts GPU memory; move the model there (model.to('cuda')), or check the option of the script that "
    "chooses the device"
)
_STAGES: dict[TaskKind, str] = {"evaluation": "evaluation", "saving": "saving", "loading the best model": "restoring"}
"""Stages of the recorder by the task that runs."""
_WRAPPERS = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"} | dict.fromkeys(
    ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"), "module"
)
"""Classes that hold a model, with the attribute that it has there."""

_STRATEGIES = {"FullyShardedDataParallel": "fsdp1", "FSDPModule": "fsdp2", "DeepSpeedEngine": "deepspeed"}
"""Classes that spread a model over GPUs, by the strategy; any other script has data parallelism alone."""


def _strategy(model: nn.Module) -> str | None:
    """Return how a model is spread, None if it is not sharded."""
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    name = next((_STRATEGIES[one] for one in sorted(_STRATEGIES) if one in classes), None)
    return f"deepspeed{model.zero_optimization_stage()}" if name == "deepspeed" else name  # type: ignore[operator]


def _wrapped(model: nn.Module) -> nn.Module:
    """Return the model in wrappers for several GPUs or of a compiler."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    return model


class ScriptObserver(PhaseMarker, ScriptListener):
    """Observer of a script of at most ``steps`` optimizer steps.

    Attributes:
        samples: Counter of the samples of a step.
        longest: Follower of batches that differ in length.
        micro_steps: Micro-batches whose gradients the last step accumulated.
        called_models: Classes of all models that were called.
        strategy: How a model is sharded, as ``Plan.strategy``; None if none is.
        models, optimizers: Those that train, as they were after the last step.
        optimizer_class: The class of all of them, None if there are several.
        dtype: The dtype of most weights.
        quantization: How weights are quantised, None if none are.
        attention: transformers' name of the attention of a model that has any.
        autocast: The dtype in which modules computed under autocast.
        steps: Steps that are complete.
        evaluated_before: Steps before which a model that trains was evaluated.
    """

    def __init__(self, process: SimulatedProcess, steps: int, script: str = "", *, looks_ahead: bool = True) -> None:
        self._script = script
        super().__init__(process.recorder)
        self._process = process
        self._last = steps - 1
        self._models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._trained: dict[int, None] = {}
        self._places: dict[int, int] = {}
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []
        self._used: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._complete = Operations()
        self._modules = self._tensors = 0
        self._loaded = False
        self._task = 0
        self._interrupted = ""  # by an evaluation, until a batch is fetched or a model called
        self._is_ahead = False
        self._called = 0
        self._called_in_step: set[int] = set()
        self._on_the_cpu = ""
        self.called_models: list[str] = []
        self.models: tuple[TrainedModel, ...] = ()
        self.strategy: str | None = None
        self.optimizers: tuple[UsedOptimizer, ...] = ()
        self.optimizer_class: type[torch.optim.Optimizer] | None = None
        self.dtype = torch.float32
        self.quantization: str | None = None
        self.attention: str | None = None
        self.samples = SampleCounter(self._fetched)
        self.longest = LongestSample(self.go_ahead, looks_ahead=looks_ahead)
        self.micro_steps = 0
        self.autocast: torch.dtype | None = None
        self.steps = 0
        self.evaluated_before: set[int] = set()

    @property
    def recorder(self) -> Recorder:
        """The recorder of the run."""
        return self._recorder

    # -- models and optimizers -----------------------------------------------------------------------------------------

    def called(self, model: nn.Module) -> None:
        """Label the tensors of a model that is called for the first time, or that has moved since."""
        self._goes_on()
        self._called = id(model)
        if id(model) not in self._models:
            self._models[id(model)] = model
            self.called_models.append(type(model).__name__)
            self._process.modules.learn(model)
        first = next(iter(model.parameters()), None)
        place = -1 if first is None else self._number(part_of(first))
        if self._places.get(id(model)) != place:
            self._places[id(model)] = place
            self._relabel(map(part_of, model.parameters()), "weight")
            self._relabel(model.buffers(), "buffer")
            self._relabel(scales(model), "scale")
        if not self._loaded and (place >= 0 or _strategy(model)):
            self._loaded = True
            self._label_states()
            self._mark_loaded(model)
            self._set_stage("other")
            if self._last == 0:
                self._operations.start(0)

    @property
    def has_trained(self) -> bool:
        """Whether a model on the GPU was called with gradients: frameworks call one on the CPU to learn of it."""
        return bool(self._trained)

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer."""
        self._made.append(weakref.ref(optimizer))

    def uses(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer.

        Raises:
            SimulationError: It decides by values of gradients how much it does, or nothing is trained on the GPU.
        """
        self._goes_on()
        if isinstance(optimizer, torch.optim.LBFGS):
            raise SimulationError(
                f"{current_place(self._script)}: LBFGS decides by the values of gradients how often it evaluates the "
                "model and what it keeps; these do not exist without a GPU.\n"
                "Measure the script: trainatomy run --measure"
            )
        if all(optimizer is not one for one in self._optimizers()):
            self.made(optimizer)
        if not self._loaded and not any(
            self._number(part_of(one)) >= 0 for group in optimizer.param_groups for one in group["params"]
        ):
            raise SimulationError(
                f"{current_place(self._script)}: {type(optimizer).__name__} updates tensors on the CPU, none on the "
                f"GPU.\n{_ON_THE_GPU}"
            )
        self._used[id(optimizer)] = self._used.get(id(optimizer), 0) + 1

    def look(self) -> None:
        """Describe the models and optimizers as they are now; when the script has ended, they may be gone."""
        trained = [model for key in self._trained if (model := self._models.get(key)) is not None]
        self.models = tuple(map(self._model, trained)) or self.models
        if trained:
            self.strategy = next(filter(None, map(_strategy, trained)), None)
            self.quantization = next(filter(None, map(quantization_of, trained)), None)
            self.attention = next(filter(None, map(attention_of, map(_wrapped, trained))), None)
            self._modules = sum(len(list(model.modules())) for model in trained)
            self._tensors = sum(len(list(model.parameters())) for model in trained)
        used = [one for one in self._optimizers() if id(one) in self._used]
        self.optimizers = (
            tuple(
                UsedOptimizer(
                    type(one).__name__, self._used[id(one)], self._most(one, tensors_in([*one.state.values()]))
                )
                for one in used
            )
            or self.optimizers
        )
        if used:
            kinds = {type(one) for one in used}
            self.optimizer_class = kinds.pop() if len(kinds) == 1 else None
        dtypes = Counter[torch.dtype]()
        for model in trained:
            for one in model.parameters():
                dtypes[one.dtype] += getattr(one, "ds_numel", one.numel())
        if dtypes:
            self.dtype = dtypes.most_common(1)[0][0]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for made in self._made if (one := made()) is not None]

    def _model(self, model: nn.Module) -> TrainedModel:
        counts = [(getattr(one, "ds_numel", parameter_count(one)), one.requires_grad) for one in model.parameters()]
        return TrainedModel(
            type(_wrapped(model)).__name__,
            sum(count for count, _ in counts),
            sum(count for count, trained in counts if trained),
            self._most(model, map(part_of, model.parameters())),
        )

    def _most(self, owner: Any, tensors: Iterable[torch.Tensor]) -> int:
        """Return the most bytes that an owner had on the GPU, from which Lightning moves tensors away at the end."""
        self._held[id(owner)] = max(self._held.get(id(owner), 0), self._bytes(tensors))
        return self._held[id(owner)]

    def _bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of tensors on the GPU: of sharded ones, those of this rank's part."""
        parts = map(self._part(), tensors)
        with torch._C.DisableTorchFunction():
            known = {number: storage_of(one).nbytes() for one in parts if (number := self._number(one)) >= 0}
        return sum(known.values())

    def _part(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that takes a tensor to what this rank holds of it."""
        if not self._process.topology.has_group:
            return lambda tensor: tensor
        return local

    # -- events of the loop --------------------------------------------------------------------------------------------

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Label the inputs of a model, and count samples."""
        self._label(batch_tensors((arguments, dict(keywords))), "input")
        self.samples.trains(arguments, keywords)
        is_first = self._called not in self._called_in_step
        self._called_in_step.add(self._called)
        self.longest.trains(self._called, arguments, keywords, is_first=is_first)

    def _mark_loaded(self, model: nn.Module) -> None:
        """Mark when the last tensor of the first model came to the GPU; its first batch came after it."""
        trace = self._recorder.trace
        last = max(map(self._number, [*model.parameters(), *model.buffers()]), default=-1)
        event = next(
            (at for at, one in enumerate(trace.events) if one.action == "alloc" and one.allocation == last), -1
        )
        trace.marks.append(Mark(event + 1, "loaded", -1))

    def trains(self, model: nn.Module) -> bool:
        """Note that a model is called with gradients; return whether it is on the GPU."""
        if id(model) not in self._trained and not self._is_on_gpu(model):
            self._on_the_cpu = f"{current_place(self._script)}: {type(model).__name__}"
            return False
        self._trained.setdefault(id(model))
        return True

    def _is_on_gpu(self, model: nn.Module) -> bool:
        """Return whether a model is computed on the GPU; shards and offloaded weights may be elsewhere between uses."""
        on_gpu = any(self._number(part_of(one)) >= 0 for one in model.parameters())
        return on_gpu or _strategy(model) is not None or has_gpu_hooks(model)

    def misses(self) -> None:
        """Refuse a backward pass where the only models that were called with gradients are on the CPU.

        Raises:
            SimulationError: That is so.
        """
        if message := self.only_on_the_cpu():
            raise SimulationError(message)

    def only_on_the_cpu(self) -> str:
        """Return that the only models that were called with gradients are on the CPU; "" if that is not so."""
        if not self._on_the_cpu or self._trained:
            return ""
        return f"{self._on_the_cpu} is trained on the CPU: none of its parameters was moved to the GPU.\n{_ON_THE_GPU}"

    def evaluated(self) -> None:
        """Leave out the operations since the last step: they evaluate, and the next step begins after them.

        What is done with the outputs afterwards (metrics, boxes) still belongs to the evaluation.
        """
        self.samples.evaluated()
        self.longest.evaluated()
        if self._task:
            return
        self.evaluated_before.add(self.steps)
        if self._operations.recording:
            self._operations.start(self.steps)
            self._interrupt("fetched")

    def evaluates_within_step(self) -> None:
        """Leave out the operations until the step goes on: with a call of a model, or with its optimizer."""
        self.samples.evaluated()
        self.longest.evaluated()
        if self._operations.recording:
            self._interrupt("called")

    def _interrupt(self, until: str) -> None:
        self._operations.pause()
        self._interrupted = until

    def _fetched(self) -> None:
        """Go on with the next step's operations, by the copies of its batch."""
        if self._interrupted == "fetched":
            self._goes_on()

    def _goes_on(self) -> None:
        if self._interrupted:
            self._interrupted = ""
            self._operations.resume()

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Execute in the block what may end a step in another way than the script does: no time is taken from it."""
        before, self._is_ahead = self._is_ahead, True
        try:
            yield
        finally:
            self._is_ahead = before

    def go_ahead(self) -> None:
        """Take the time of no step from now on."""
        self._is_ahead = True

    def task_begin(self, kind: TaskKind) -> None:
        """Begin a task besides the steps, whose operations belong to none."""
        self._recorder.mark(kind)
        self._set_stage(_STAGES[kind])
        self._task += 1
        self._operations.pause()

    def task_end(self, kind: TaskKind) -> None:
        """End it, and begin the operations of the next step anew."""
        self._recorder.mark(f"{kind} end")
        self._set_stage("other")
        self._task -= 1
        self.samples.evaluated()
        self.longest.evaluated()
        if not self._task and self.steps:
            self._operations.start(self.steps)

    def step_begin(self, step: int) -> None:
        super().step_begin(step)
        self.samples.step_begin()
        self._called_in_step.clear()

    def micro_step_end(self, micro_step: int) -> None:
        super().micro_step_end(micro_step)
        self.samples.backward_ended()

    def optimizer_end(self) -> None:
        super().optimizer_end()
        self.samples.gradients_used()

    def zero_grad_end(self) -> None:
        super().zero_grad_end()
        self.samples.gradients_used()

    def step_end(self, step: int) -> None:
        """End a step; the operations of each but the first are written, as any may be the script's last."""
        super().step_end(step)
        self.look()
        self.steps = step + 1
        self.micro_steps = self.samples.micro_batches()
        if self._operations.recording and not (self._is_ahead and self._complete.operations):
            self._complete = self._operations.operations
        self._operations.stop()
        self._operations.start(step + 1)

    def end(self) -> Operations:
        """Return the operations of the last complete step."""
        self._operations.stop()
        found = self._complete if self.steps else self._operations.operations
        found.modules, found.parameters = self._modules, self._tensors
        return found

    # -- labels --------------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[torch.Tensor]:
        for model in list(self._models.values()):
            yield from model.parameters()
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of all models and of everything that optimizers update."""
        yield from (one.grad for one in self._parameters() if one.grad is not None)

    def states(self) -> Iterator[torch.Tensor]:
        """Yield the states of all optimizers."""
        for optimizer in self._optimizers():
            yield from tensors_in(list(getattr(optimizer, "state", {}).values()))

    def engines(self) -> Iterator[Any]:
        """Yield the optimizers of DeepSpeed's engines."""
        yield from (vars(model).get("optimizer") for model in list(self._models.values()))

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._recorder.number_of(tensor)
        return -1 if number is None else number

    def _relabel(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Label tensors, also those that counted as inputs when they came to the GPU."""
        for tensor in tensors:
            if (number := self._number(tensor)) >= 0:
                self._recorder.trace.labels[number] = label
