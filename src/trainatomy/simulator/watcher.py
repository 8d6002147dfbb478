"""Observer of a simulated training loop: writes what only the loop knows to the allocation trace.

That is where steps and their phases begin, and which tensors are weights, gradients and optimizer states.

Marks of a loop's phases in the allocation trace, for every loop that is simulated: a workload's and a script's.

The names are those of a measured trace (``measurement.traces.trace.PHASES``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainatomy.results.operations import Operations
from trainatomy.results.tasks import RestoringPurpose
from trainatomy.results.time import Work
from trainatomy.simulator.evaluation import ExecutedEvaluation, ExecutedSaving, RepeatedBatches
from trainatomy.simulator.generation import CallOfGenerate, RepeatedGeneration, StepBegin, repeat_step
from trainatomy.simulator.micro_batches import Recollections
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.repetition import Repetition
from trainatomy.training.loops.generation import cache_size
from trainatomy.training.observer import Observer
from trainatomy.training.optimizer import states_of
from trainatomy.training.parallel.deepspeed import engine_tensors, part_of
from trainatomy.training.process import host_states
from trainatomy.training.quantization import scales


class PhaseMarker(Observer):
    """Observer that marks where steps and their phases begin and end, and labels gradients and optimizer states.

    A subclass knows the tensors: it says which are gradients and states, and when operations are written.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._host_states: dict[str, Any] = {}
        self._sizes: list[int] = []
        self._begun_at = 0
        self._operations = recorder.operations

    def gradients(self) -> Iterable[torch.Tensor]:
        """Return the gradients that exist."""
        raise NotImplementedError

    def states(self) -> Iterable[torch.Tensor]:
        """Return the optimizers' states that exist."""
        raise NotImplementedError

    def engines(self) -> Iterable[Any]:
        """Return optimizers that may hold gradients and states in buffers of their own, as DeepSpeed's do."""
        raise NotImplementedError

    def step_begin(self, step: int) -> None:
        """Begin a step."""
        self._recorder.step = step
        self._recorder.mark("step")
        self._set_stage("other")

    def micro_step_begin(self, micro_step: int) -> None:
        """Begin the forward pass of a micro-batch."""
        self._host_states, self._begun_at = host_states(), len(self._recorder.trace.origins)
        self._recorder.mark("forward")
        self._operations.micro_step = micro_step
        self._set_stage("forward")

    def forward_end(self) -> None:
        """End the forward pass: its results that are still held are held for backward."""
        self._recorder.mark("forward end")
        self._note_draws()
        self._set_stage("other")

    def _note_draws(self) -> None:
        """Note where a forward pass drew numbers on the host and allocated more or less often than another.

        The first one does not count: it allocates what is made once.
        """
        drawn = {name for name, state in host_states().items() if self._host_states.get(name, state) != state}
        self._sizes.append(len(self._recorder.trace.origins) - self._begun_at)
        if len(set(self._sizes[1:])) > 1:
            self._recorder.host_draws |= drawn

    def micro_step_end(self, micro_step: int) -> None:
        """Label the gradients."""
        self._label_gradients()
        self._recorder.mark("backward end")

    def optimizer_begin(self) -> None:
        """Begin the optimizer's step."""
        self._label_gradients()
        self._recorder.mark("optimizer")
        self._set_stage("optimizer")

    def optimizer_end(self) -> None:
        """Label the optimizer's states."""
        self._label_states()
        self._recorder.mark("optimizer end")
        self._set_stage("other")

    def zero_grad_begin(self) -> None:
        """Begin to release gradients or fill them with zeros."""
        self._recorder.mark("zero_grad")
        self._operations.stage = "zero_grad"

    def zero_grad_end(self) -> None:
        """End of ``zero_grad``."""
        self._recorder.mark("zero_grad end")
        self._operations.stage = self._recorder.stage

    def step_end(self, step: int) -> None:
        """End a step."""
        self._recorder.mark("step end")

    def _set_stage(self, name: str) -> None:
        self._recorder.stage = self._operations.stage = name

    def _label_gradients(self) -> None:
        self._label(self.gradients(), "gradient")
        self._label_engines()

    def _label_states(self) -> None:
        self._label(self.states(), "optimizer_state")
        self._label_engines()

    def _label_engines(self) -> None:
        for optimizer in self.engines():
            for label, tensors in engine_tensors(optimizer).items():
                self._label(tensors, label)

    def _label(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        for tensor in tensors:
            self._recorder.label(tensor, label)


EXECUTED_MICRO_STEPS = 4
"""Micro-batches of a step that are executed: one that makes the gradients, two that add to them, and the last, after
which the optimizer steps."""


class Watcher(PhaseMarker):
    """Observer of a simulated run (see ``training.observer.Observer``) of ``steps`` steps.

    The operations of the last step are written, and the last evaluation is kept by the recorder.

    Args:
        recorder: Recorder of the run.
        steps: Number of its steps.
        recollections: Earlier runs of the same training with other optimizers.

    Attributes:
        keeps_step_before: True if the recorder keeps the operations of the last step but one, too.
    """

    def __init__(self, recorder: Recorder, steps: int, recollections: Recollections | None = None) -> None:
        super().__init__(recorder)
        self.keeps_step_before = False
        self._last = steps - 1
        self._micro_steps = self._given = 1
        self._begun = (0, 0)
        self._paused = (0, False)
        self._restoring: RestoringPurpose = "resume"
        self._call, self._tokens = CallOfGenerate(recorder), 0
        self._calls = RepeatedGeneration(recorder)
        self._begins = StepBegin(0, 0, 0)
        self._executed = Operations()
        self._repetition = Repetition(recorder, recollections)
        self._batches = RepeatedBatches(recorder, self._repetition.host_state)
        self._interrupted: tuple[Operations, bool] | None = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def loaded(self, model: nn.Module) -> None:
        """Label the model's tensors: nothing else is on the GPU yet."""
        self._model = model
        self._repetition.loaded(model)
        self._label(map(part_of, model.parameters()), "weight")
        self._label(model.buffers(), "buffer")
        self._label(scales(model), "scale")
        self._recorder.mark("loaded")
        self._set_stage("other")

    def reference_loaded(self, model: nn.Module) -> None:
        """Label the tensors of a model that the loss compares the trained one with."""
        self._label_again(model, "reference_weight")

    def average_kept(self, model: nn.Module) -> None:
        """Label the tensors of a copy of the model."""
        self._label_again(model, "average_weight")

    def _label_again(self, model: nn.Module, label: str) -> None:
        """Label the tensors of a further model, which arrived as inputs do."""
        for tensor in (*map(part_of, model.parameters()), *model.buffers(), *scales(model)):
            self._recorder.label(tensor, label, again=True)

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Label the optimizer's states; some optimizers make them at once."""
        self._optimizer = optimizer
        self._label_states()
        self._repetition.between_steps()
        if self._last == 0 or optimizer is None:  # a further step without an optimizer may be a copy of the first
            self._operations.start(0)

    def step_begin(self, step: int) -> None:
        """Begin a step."""
        trace = self._recorder.trace
        self._begins = StepBegin(len(trace.events), len(trace.origins), len(trace.marks))
        super().step_begin(step)

    def micro_step_begin(self, micro_step: int) -> None:
        """Begin the forward pass of a micro-batch."""
        self._repetition.begin(micro_step)
        self._count(micro_step)
        super().micro_step_begin(micro_step)

    def repeat(self, micro_step: int, batch: Any) -> torch.Tensor | None:
        """Return the loss of a micro-batch that was copied from one before; None if it has to be executed."""
        self._count(micro_step)
        loss = self._repetition.repeat(micro_step, batch, is_last=micro_step == self._given - 1)
        self._operations.repeats = 1
        return loss

    def _count(self, micro_step: int) -> None:
        """Let the operations that follow belong to a micro-batch and those that it stands for."""
        third = micro_step == EXECUTED_MICRO_STEPS - 2
        self._operations.micro_step = micro_step
        self._operations.repeats = max(1, self._micro_steps - EXECUTED_MICRO_STEPS + 1) if third else 1

    def leaves_out(self, micro_step: int, of: int) -> bool:
        """Return True for micro-batches between the third and the last: they repeat the third."""
        self._micro_steps = self._given = of
        left_out = EXECUTED_MICRO_STEPS - 1 <= micro_step < of - 1
        if left_out:
            self._operations.skip_placeholder()
        return left_out

    def loss_kept(self, loss: torch.Tensor) -> None:
        """Note the loss that lives until the next micro-batch."""
        self._repetition.kept(loss)

    def micro_step_end(self, micro_step: int) -> None:
        """Label the gradients; the micro-batch may be copied from now on."""
        super().micro_step_end(micro_step)
        self._repetition.end()
        self._operations.repeats = 1

    def stage_begin(self, work: str, stage: int, micro_batch: int) -> None:
        """Begin a part of a micro-batch in a stage of a pipeline."""
        self._operations.stage_begin(Work(work, stage, micro_batch))

    def stage_end(self) -> None:
        """End it."""
        self._operations.stage_end()

    def step_end(self, step: int) -> None:
        """End a step."""
        super().step_end(step)
        self._executed = self._operations.operations
        self._repetition.between_steps()
        if step == self._last - 2 and self.keeps_step_before:
            self._operations.start(self._last - 1)
        elif step == self._last - 1:  # batches move to the GPU between steps, which belongs to the next step
            self._recorder.step_before = self._executed if self.keeps_step_before else None
            self._operations.start(self._last)
        elif step == self._last:
            self._operations.stop()

    def evaluates_after(self, step: int) -> bool:
        """Return True for the last step but one: the last one shows what an evaluation leaves behind."""
        return step == max(0, self._last - 1)

    def saving_begin(self) -> None:
        """Begin to save a checkpoint, whose operations belong to no step."""
        self._begin_pause("saving")

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        """End saving a checkpoint."""
        self._recorder.saving = ExecutedSaving(self._end_pause("saving end"), dict(files))

    def restoring_begin(self, purpose: RestoringPurpose) -> None:
        """Begin to load a checkpoint, or its second part; its operations belong to no step."""
        self._begin_pause("restoring")
        self._restoring = purpose

    def restoring_end(self) -> None:
        """End loading a checkpoint, or a part of it."""
        events = self._end_pause("restoring end")
        begin = self._recorder.restored.get(self._restoring, events).start
        self._recorder.restored[self._restoring] = range(begin, events.stop)
        if self._optimizer is not None and self._restoring == "resume":  # the states arrived as inputs do
            for tensor in states_of(self._optimizer):
                self._recorder.label(tensor, "optimizer_state", again=True)

    def _begin_pause(self, mark: str) -> None:
        self._recorder.mark(mark)
        self._set_stage(mark)
        self._paused = len(self._recorder.trace.events), self._operations.recording
        self._operations.pause()

    def _end_pause(self, mark: str) -> range:
        """Go on with the training, and return the events in between."""
        begin, was_writing = self._paused
        self._recorder.mark(mark)
        self._set_stage("other")
        if was_writing:
            self._operations.resume()
        self._repetition.interrupted()
        return range(begin, len(self._recorder.trace.events))

    def evaluation_begin(self, batches: int) -> None:
        """Begin an evaluation: its operations are written apart from those of a step."""
        self._interrupted = self._operations.operations, self._operations.recording
        self._operations.stop()
        self._recorder.mark("evaluation")
        self._recorder.gathered.begin()
        self._set_stage("evaluation")
        self._operations.start(self._recorder.step)
        self._operations.stage, self._operations.micro_step = "other", -1
        self._begun = len(self._recorder.trace.events), batches

    def repeat_evaluation(self, batch: Any) -> Any:
        """Return the outputs of a batch that was copied from one before; None if it has to be executed."""
        self._recorder.mark("evaluation forward")
        self._operations.micro_step += 1
        outputs = self._batches.repeat(batch)
        if outputs is not None:
            self._recorder.mark("evaluation forward end")
        return outputs

    def evaluation_forward_begin(self) -> None:
        """Begin the forward of an evaluation batch."""
        self._operations.stage = "forward"
        self._batches.begin()

    def evaluation_forward_end(self, outputs: Any) -> None:
        """End the forward of an evaluation batch."""
        self._batches.end(outputs)
        self._operations.stage = "other"
        self._recorder.mark("evaluation forward end")

    def evaluation_end(self) -> None:
        """End an evaluation, and go on with the operations of the step that it interrupted."""
        self._operations.stop()
        self._recorder.mark("evaluation end")
        self._set_stage("other")
        begin, batches = self._begun
        events = range(begin, len(self._recorder.trace.events))
        self._recorder.evaluation = ExecutedEvaluation(events, batches, self._operations.operations)
        assert self._interrupted is not None
        self._operations.operations, was_writing = self._interrupted
        if was_writing:
            self._operations.start(self._operations.operations.step)
        self._repetition.interrupted()

    def repeat_generate(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Write a call of ``generate()`` that repeats the last one; None if it has to be executed."""
        return self._calls.repeat(model, arguments, keywords)

    def generation_begin(self, tokens: int) -> None:
        """Begin ``generate()`` with the prompts."""
        assert self._model is not None
        self._recorder.mark("generation")
        self._recorder.stage, self._operations.stage = "prefill", "forward"
        self._tokens = tokens
        self._call.begin(self._model)

    def token_begin(self, token: int) -> None:
        """Begin a further token."""
        self._recorder.mark("token")
        self._recorder.stage = "decode"
        self._call.token_begin(token, self._tokens)

    def cached(self, tensors: list[torch.Tensor]) -> None:
        """Label keys and values."""
        self._label(tensors, "key_value_cache")
        if tensors:
            self._call.cache = cache_size(tensors)

    def generation_end(self) -> None:
        """End ``generate()``."""
        self._recorder.mark("generation end")
        self._set_stage("other")
        self._recorder.generation = self._call.end()

    def generated(self, tokens: torch.Tensor, word: int) -> None:
        """Let all tokens be ``word``, so that none of them ends a sequence."""
        self._calls.end(tokens)
        with torch._C.DisableTorchFunction():
            words = torch.full(tokens.shape, word, dtype=tokens.dtype, device="cpu")
            self._recorder.values.learn(tokens, words)

    def repeat_generation(self, step: int) -> bool:
        """Write the call of the step before once more, as step ``step``; return False if it has to be executed."""
        operations = repeat_step(self._recorder.trace, self._begins, self._executed, step)
        if operations is None:
            return False
        if step == self._last:
            self._operations.stop()
            self._operations.operations = operations
        return True

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of the model."""
        assert self._model is not None
        yield from (p.grad for p in self._model.parameters() if p.grad is not None)

    def states(self) -> Iterator[torch.Tensor]:
        """Yield the optimizer's states."""
        return states_of(self._optimizer)

    def engines(self) -> Iterator[Any]:
        """Yield the optimizer."""
        yield self._optimizer
