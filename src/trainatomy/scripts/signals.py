"""The signals of a training loop in a process whose models and optimizers are not known beforehand.

A step is over when every optimizer that was made has stepped; an evaluation after it belongs to no step.  If one steps
twice before the others, those do not belong to every step (a GAN that trains its critic five times as often), and the
loop goes on until each optimizer has stepped twice.  One that is called for each group of its parameters, with no
forward pass between them, takes one step.  An optimizer that is made after others have stepped begins another training,
unless one of those steps again.  In a loop that updates its weights by hand, each backward is a step.

Threads of a script: what its own code and that of frameworks does in them is simulated like the rest.

PyTorch's modes belong to a thread, so that they are entered in each one whose function is neither Python's nor
PyTorch's.  Threads take turns where they wait for each other, and else keep the processor: an operation that is being
recorded is not interrupted by another one.  An exception that ends the dry run in a thread ends the script.
"""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import thread as executors
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainatomy.scripts.job import is_of_platform, is_users, place_of
from trainatomy.training.observer import LoopSignals, Observer, removed, wrapped

if TYPE_CHECKING:
    from trainatomy.simulator.modules import ModuleTracker
    from trainatomy.simulator.process import SimulatedProcess


_WRAPPERS = frozenset({"AcceleratedOptimizer", "DeepSpeedOptimizerWrapper", "DummyOptim"})
"""Subclasses of ``Optimizer`` that only hold another one."""


_MOST_STEPS = 4
"""Times the steps that were asked for, after which a loop ends though an optimizer has not stepped twice."""


class StepsDone(BaseException):
    """The steps that were asked for are over; no ``except Exception`` of the script catches it."""


class ScriptListener(Observer):
    """An observer that is told about models and optimizers when they are first seen."""

    def called(self, model: nn.Module) -> None:
        """An outermost model is about to be called, with or without gradients."""

    def trains(self, model: nn.Module) -> bool:
        """It is about to be called with gradients; return whether it is on the GPU, and thus trained."""
        return True

    def evaluated(self) -> None:
        """A model was called in eval mode and without gradients, between two steps, and not as a part of each."""

    def evaluates_within_step(self) -> None:
        """It is about to be called so between two micro-batches of a step, where an epoch ends."""

    def misses(self) -> None:
        """A backward pass begins though no model was called that trains."""

    def made(self, optimizer: Optimizer) -> None:
        """An optimizer was made."""

    def uses(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""


class ScriptSignals(LoopSignals):
    """Reports the events of a script's loop, and ends it after ``steps`` steps, once each optimizer has stepped twice.

    Args:
        listener: What is told.
        steps: Steps after which ``StepsDone`` is raised.
        modules: Modules that are being called.
        check: Called before each forward with gradients; may raise (a time limit).
        goes_on: Returns whether another step is executed although the steps are over.
        plain_inside: Leave ``Module.__call__`` as it is within an outermost call, for a compiler that traces it.
    """

    def __init__(
        self,
        listener: ScriptListener,
        steps: int,
        modules: ModuleTracker | None = None,
        check: Callable[[], None] = lambda: None,
        goes_on: Callable[[], bool] = lambda: False,
        *,
        plain_inside: bool = False,
    ) -> None:
        super().__init__(listener)
        self._script: ScriptListener = listener
        self._steps, self._modules, self._check, self._goes_on = steps, modules, check, goes_on
        self._expected: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._ended: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those of trainings that another one followed
        self._resumed = False  # one of them stepped again: an optimizer of this loop is made anew in each step
        self._stepped: set[int] = set()
        self._updated: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()  # in this step
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._of_first_step: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were called in it or before
        self._plain_inside = plain_inside
        self._plain_call: Callable[..., Any] = nn.Module.__call__
        self._depth = 0
        self._is_decided = False  # whether the next step is executed

    @property
    def finished(self) -> int:
        """Steps that are over, with one that only the next forward will end."""
        is_open = self._in_step and not (self._optimizer_has_stepped and self.is_over())
        return self._step + (not is_open)

    def is_done(self) -> bool:
        """Return whether the steps that were asked for are over, and every optimizer has stepped twice in them."""
        done = self.finished
        return done >= self._steps and (self._all_step() or done >= self._steps * _MOST_STEPS)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Listen to the whole process in the block."""
        enter = self._attached.enter_context
        self._plain_call = nn.Module.__call__
        enter(mock.patch.object(nn.Module, "__call__", self._calling(nn.Module.__call__)))
        enter(wrapped(torch.autograd, "backward", self.around_backward))
        enter(wrapped(nn.Module, "zero_grad", self.around_zero_grad))
        enter(wrapped(Optimizer, "zero_grad", self.around_zero_grad))
        enter(wrapped(Optimizer, "__init__", self._around_making))
        enter(removed(register_optimizer_step_pre_hook(self._on_step)))
        enter(removed(register_optimizer_step_post_hook(self._on_step_end)))
        try:
            yield
        finally:
            self.detach()

    def is_over(self) -> bool:
        """Return whether all optimizers of a step have stepped; without any, whether there are gradients."""
        expected = {id(optimizer) for optimizer in self._expected}
        return expected <= self._stepped if expected else self._has_gradients

    def is_over_once_zeroed(self) -> bool:
        return self._has_gradients and self.is_over()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Leave ``Module.__call__`` as it is in the block."""
        with mock.patch.object(nn.Module, "__call__", self._plain_call):
            yield

    def calls(
        self,
        module: nn.Module | None,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> Any:
        """Call a function that calls ``module`` (None: none) where no calls of modules can be seen."""
        if self._depth or torch._C._current_graph_task_id() != -1:
            return function(*arguments, **keywords)
        self._depth += 1
        evaluates = False
        try:
            if module is not None:
                evaluates = self._outermost(module, arguments, keywords)
            with self.plain():
                return function(*arguments, **keywords)
        finally:
            self._depth -= 1
            if evaluates:
                self._script.evaluated()

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``Module.__call__`` that sees which calls are outermost."""

        @functools.wraps(original)
        def call(module: nn.Module, /, *arguments: Any, **keywords: Any) -> Any:
            if self._depth or torch._C._current_graph_task_id() != -1:
                return original(module, *arguments, **keywords)
            self._depth += 1
            evaluates = False
            try:
                evaluates = self._outermost(module, arguments, keywords)
                if not self._plain_inside:
                    return original(module, *arguments, **keywords)
                with self.plain():
                    return original(module, *arguments, **keywords)
            finally:
                self._depth -= 1
                if evaluates:
                    self._script.evaluated()

        return call

    def _outermost(self, module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
        """Report the call of a model; return whether it is an evaluation between two steps.

        A model in eval mode that the first step did without evaluates, too: an average of the weights (EMA), the
        network of a metric. A teacher or a reference model is called in the first step as in all others.
        """
        if next(module.parameters(), None) is None:
            return False
        self._check()
        self._script.called(module)
        if not self.finished:
            self._of_first_step.add(module)
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            if self._script.trains(module):
                self._trained.add(module)
                self.forward(arguments, keywords)
        elif not module.training and (self._is_trained(module) or module not in self._of_first_step):
            self.end_step_that_is_over()
            if not self._in_step:
                return True
            if module not in self._of_first_step and not self._in_forward:
                self._script.evaluates_within_step()
        return False

    def _is_trained(self, module: nn.Module) -> bool:
        """Return whether a model trains, or is part of one that does (``model.module``)."""
        if module in self._trained:
            return True
        first = next(module.parameters())
        return any(first is one for trained in self._trained for one in trained.parameters())

    def around_backward(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self._backward_depth == 0 and not self._in_forward:
            self._script.misses()
        return super().around_backward(original, *arguments, **keywords)

    def loop_turns(self) -> None:
        """Note that a framework's loop begins its next turn, before it calls any model.

        The run ends here where it would at the model's forward: what a turn does before it (GRPO generates, rewards,
        calls a reference model) is not executed for a step that is not.
        """
        if not self._in_step or (self._optimizer_has_stepped and self.is_over()):
            self._end_if_done()

    def _begin_step(self) -> None:
        if not self._in_step:
            self._end_if_done()
            self._is_decided = False
        super()._begin_step()

    def _end_if_done(self) -> None:
        """End the run before a step that is not to be executed; asked once for each step."""
        if not self._is_decided and self.is_done() and not self._goes_on():
            raise StepsDone
        self._is_decided = True

    def _all_step(self) -> bool:
        """Return whether every optimizer has stepped with the states of an earlier step."""
        return all(count >= min(2, self._steps) for count in self._counts.values())

    def _end_step(self) -> None:
        self._stepped.clear()
        self._updated.clear()
        super()._end_step()

    def _around_making(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if type(optimizer).__name__ not in _WRAPPERS:
            self.end_step_that_is_over()
            if not self._resumed:
                self._ended.update(one for one in self._expected if self._counts.get(one))
                self._expected -= self._ended
            self._expected.add(optimizer)
            self._counts[optimizer] = 0
            self._script.made(optimizer)

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if type(optimizer).__name__ in _WRAPPERS:
            return
        if self._goes_on_with_step(optimizer):
            self._optimizer_goes_on()
            return
        if id(optimizer) in self._stepped and not self.is_over():
            self._expected = weakref.WeakSet([optimizer])  # again before the others: they do not belong to every step
        self._resumed = self._resumed or optimizer in self._ended
        self._expected.add(optimizer)
        self.end_step_that_is_over()
        self._begin_step()
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self._script.uses(optimizer)
        self.optimizer_begins()
        self._updated[optimizer] = _updated_by(optimizer)  # after a step that this one has ended

    def _goes_on_with_step(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer updates what it has not updated in this step, as DeepSpeed's by groups do."""
        before, updates = self._updated.get(optimizer), _updated_by(optimizer)
        if not before or not updates or not before.isdisjoint(updates):  # with a closure, gradients come later
            return False
        before |= updates
        return True

    def _on_step_end(self, optimizer: Optimizer, *_: Any) -> None:
        if type(optimizer).__name__ in _WRAPPERS:
            return
        self._stepped.add(id(optimizer))
        self.optimizer_ends()


def _updated_by(optimizer: Optimizer) -> set[int]:
    """Return the identities of the parameters that a step of an optimizer updates."""
    return {id(one) for group in optimizer.param_groups for one in group["params"] if one.grad is not None}


_TURN = 5.0
"""Seconds after which a thread that does not wait for anything lets others run."""


class Threads:
    """Follows the threads of a dry run.

    Args:
        process: The simulated process.
        ends: Exceptions that end the dry run.

    Attributes:
        ending: The exception that ended the dry run in a thread.
        failed: What the last thread that failed raised.
    """

    def __init__(self, process: SimulatedProcess, ends: tuple[type[BaseException], ...]) -> None:
        self._process, self._ends = process, ends
        self._turn = sys.getswitchinterval()
        self.ending: BaseException | None = None
        self.failed: Exception | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the threads that are started in the block."""
        item: Any = executors._WorkItem
        try:
            with (
                wrapped(threading.Thread, "start", self._around_start),
                wrapped(threading.Thread, "join", self._around_join),
                wrapped(item, "run", self._around_work),
            ):
                yield
        finally:
            sys.setswitchinterval(self._turn)

    def _around_start(self, original: Callable[..., Any], thread: threading.Thread) -> None:
        function = getattr(thread, "_target", None) or type(thread).run
        if not is_of_platform(_file_of(function)):
            run = thread.run
            thread.run = lambda: self._run(run)  # type: ignore[method-assign]
        original(thread)

    def _around_join(self, original: Callable[..., Any], thread: threading.Thread, *limit: Any, **named: Any) -> None:
        original(thread, *limit, **named)
        if self.ending is not None and threading.current_thread() is threading.main_thread():
            raise self.ending

    def _around_work(self, original: Callable[..., Any], item: Any) -> None:
        if not is_users(_file_of(getattr(item, "fn", None) or getattr(item, "task", (None,))[0])):
            original(item)
            return
        with self._entered():
            original(item)  # which keeps what the function raises for the thread that asks for its result

    def _run(self, run: Callable[[], None]) -> None:
        """Run a thread's function; what ends the dry run ends the main thread, too."""
        try:
            with self._entered():
                run()
        except self._ends as error:
            self.ending = error
            if callable(signal.getsignal(signal.SIGALRM)):  # which raises ``ending`` in the main thread
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        except Exception as error:
            self.failed = error
            print(f"{place_of(error)} raised {type(error).__name__} in a thread: {error}", file=sys.stderr)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Simulate what this thread does in the block."""
        sys.setswitchinterval(_TURN)
        with self._process.recorder, self._process.functions:
            yield


def _file_of(function: Any) -> str:
    """Return the file of a function; a name that is none's for one in C."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return "<C>" if code is None else code.co_filename
