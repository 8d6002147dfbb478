"""Evaluations and checkpoints of transformers' Trainer, and of the trainers that are made of it (TRL's and others)."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from heapq import merge
from typing import Any
from unittest import mock

from trainatomy.scripts.job import is_users
from trainatomy.scripts.tasks.planned import EvaluationBatches, Tasks
from trainatomy.simulator.evaluation import RepeatedBatches, arrays_without_data
from trainatomy.training.process import host_states

_PREDICTION = "Prediction"
"""Description of the evaluation loop of ``predict()``, whose arrays the script uses."""
_PLAIN = (bool, int, float, str)
_LARGE = 1 << 26
"""Elements from which on gathered arrays have no data."""


def install(tasks: Tasks) -> None:
    """Follow the Trainer once it is imported.

    A framework may replace its methods later (axolotl writes them anew from their source), so that they are looked at
    again when a training begins.
    """
    in_place: dict[str, Any] = {}

    def follow(trainer: type) -> None:
        for name, around in _FOLLOWED.items():
            if inspect.getattr_static(trainer, name) is not in_place.get(name):
                tasks.stand_ins.put(trainer, name, _around(tasks, getattr(trainer, name), around))
                in_place[name] = inspect.getattr_static(trainer, name)

    def follow_training(module: Any) -> None:
        def train(_: Tasks, original: Callable[..., Any], trainer: Any, *arguments: Any, **keywords: Any) -> Any:
            follow(module.Trainer)
            return original(*arguments, **keywords)

        follow(module.Trainer)
        tasks.stand_ins.put(module.Trainer, "train", _around(tasks, module.Trainer.train, train))

    tasks.stand_ins.when("transformers.trainer", follow_training)


def _around(tasks: Tasks, original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        return around(tasks, functools.partial(original, trainer), trainer, *arguments, **keywords)

    return replacement


# -- what the configuration plans --------------------------------------------------------------------------------------


def _at_step_end(tasks: Tasks, original: Callable[..., Any], trainer: Any, *arguments: Any, **keywords: Any) -> None:
    """Log, evaluate and save as the Trainer does after a step; after the last one, also what it would do later."""
    original(*arguments, **keywords)
    tasks.of_trainer(trainer, trainer.state.global_step, trainer.state.max_steps)
    if not tasks.become_due() or trainer.state.global_step >= trainer.state.max_steps:
        return
    control = trainer.control

    def ask(what: str) -> None:
        setattr(control, what, True)
        try:
            original(*arguments, **keywords)
        finally:
            setattr(control, what, False)

    if names := _own_callbacks(trainer):
        tasks.plan("callbacks", trainer.state.global_step, f"{names} may do more in later steps")
    evaluation, saving = (_first(trainer, what) for what in ("should_evaluate", "should_save"))
    if evaluation is None and trainer.eval_dataset is not None:
        evaluation = trainer.state.max_steps if trainer.args.do_eval else None
        tasks.plan(
            "evaluation", evaluation, "" if trainer.args.do_eval else "the script may call it after the training"
        )
    if trainer.args.save_strategy == "best":
        saving = evaluation
    saves = saving not in (None, trainer.state.global_step) and tasks.plan("saving", saving)
    if evaluation not in (None, trainer.state.global_step) and tasks.plan("evaluation", evaluation):
        with _no_metrics(trainer):
            tasks.execute("evaluation", lambda: ask("should_evaluate"))
    if saves and tasks.plan("saving", saving):  # unless it was saved as the best model so far
        tasks.execute("saving", lambda: ask("should_save"))
    # Otherwise the best weights come by way of the host, and adapters take less than their gradients did in a step.
    is_gathered = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if is_gathered and trainer.state.best_model_checkpoint and trainer.args.load_best_model_at_end:
        tasks.plan("loading the best model", trainer.state.max_steps)
        tasks.execute("loading the best model", trainer._load_best_model)


def _own_callbacks(trainer: Any) -> str:
    """Return the names of the callbacks that the user wrote, whose plans no configuration says."""
    kinds = dict.fromkeys(map(type, trainer.callback_handler.callbacks))
    files = {kind: getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    return ", ".join(kind.__name__ for kind, file in files.items() if file is not None and is_users(file))


def _first(trainer: Any, what: str) -> int | None:
    """Return the step after which the Trainer's callbacks will ask for something, None if they never do.

    It may be the step that is over now, whose epoch ends.
    """
    from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

    args, state = trainer.args, copy(trainer.state)
    epoch = max(1, round(state.global_step / state.epoch)) if state.epoch else state.max_steps
    first = state.global_step
    periods = [epoch, *(int(one) for one in (state.eval_steps, state.save_steps) if one and one >= 1)]
    candidates = (range(-(-first // period) * period, state.max_steps, period) for period in periods)
    for step in merge(*candidates, [state.max_steps]):
        state.global_step, state.epoch = step, step / epoch
        control, flow = TrainerControl(), DefaultFlowCallback()
        if step > first:
            flow.on_step_end(args, state, control)
        if step % epoch == 0 or step == state.max_steps:
            flow.on_epoch_end(args, state, control)
        if getattr(control, what):
            return step
    return None


@contextmanager
def _no_metrics(trainer: Any) -> Iterator[None]:
    """Let metrics be computed of nothing: they get arrays on the host, and change no memory of the GPU."""
    if trainer.compute_metrics is None or trainer.args.batch_eval_metrics:
        yield
        return
    metrics = {str(trainer.args.metric_for_best_model or "loss").removeprefix("eval_"): 0.0}
    with mock.patch.object(trainer, "compute_metrics", lambda _: dict(metrics)):
        yield


# -- what it executes --------------------------------------------------------------------------------------------------


def _evaluation(
    tasks: Tasks,
    original: Callable[..., Any],
    trainer: Any,
    dataloader: Any,
    description: str,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Evaluate: batches that repeat are copied, and the loop ends where further ones show nothing new."""
    recorder = tasks.observer.recorder
    batches = _length(dataloader)
    with tasks.evaluating(batches) as followed, arrays_without_data(recorder, above=_LARGE):
        repeated = RepeatedBatches(recorder, _host_state_of(trainer.model))
        step = _step(tasks, trainer.prediction_step, repeated, followed)
        with mock.patch.object(trainer, "prediction_step", step):
            loader = dataloader if description == _PREDICTION else _Shortened(dataloader, followed)
            return original(loader, description, *arguments, **keywords)


def _host_state_of(model: Any) -> Callable[[], Any]:
    """Return the function that returns what a batch may change on the host: random numbers, counters of modules."""
    modules = list(model.modules())

    def state() -> Any:
        plain = [value for module in modules for value in vars(module).values() if type(value) in _PLAIN]
        return hash(tuple(host_states().values())), plain

    return state


def _step(
    tasks: Tasks, original: Callable[..., Any], repeated: RepeatedBatches, followed: EvaluationBatches
) -> Callable[..., Any]:
    """Return ``prediction_step`` that copies a batch where it repeats the one before."""

    def step(model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        recorder = tasks.observer.recorder
        can_repeat = isinstance(inputs, Mapping)
        recorder.mark("evaluation forward")
        outputs = repeated.repeat(inputs) if can_repeat else None
        if outputs is None:
            if can_repeat:
                repeated.begin()
            outputs = original(model, inputs, *arguments, **keywords)
            if can_repeat:
                repeated.end(outputs)
        recorder.mark("evaluation forward end")
        followed.ended(inputs)
        return outputs

    return step


class _Shortened:
    """A loader whose iteration ends where further batches show nothing new."""

    def __init__(self, loader: Any, followed: EvaluationBatches) -> None:
        self._loader, self._followed = loader, followed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            if self._followed.is_enough():
                getattr(self._loader, "end", lambda: None)()  # accelerate's, which counts the loaders that are read
                return


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a data set that is read as a stream
        return None


def _saving(tasks: Tasks, original: Callable[..., Any], trainer: Any, *arguments: Any, **keywords: Any) -> None:
    with tasks.executing("saving"):
        original(*arguments, **keywords)


def _loading(tasks: Tasks, original: Callable[..., Any], trainer: Any) -> None:
    with tasks.executing("loading the best model"):
        original()


_FOLLOWED: Mapping[str, Callable[..., Any]] = {
    "_maybe_log_save_evaluate": _at_step_end,
    "evaluation_loop": _evaluation,
    "_save_checkpoint": _saving,
    "_load_best_model": _loading,
}
"""Methods of the Trainer that are followed, and what is done around each."""
