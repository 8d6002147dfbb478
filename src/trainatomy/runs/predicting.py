"""Predictions of many training runs in parallel processes.

Predictions that are kept in a folder of any filesystem, so that an interrupted comparison continues from them.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.libraries import installed_versions
from trainatomy.records.store import Folder
from trainatomy.results.prediction import Prediction
from trainatomy.runs.executions import executions, executions_kept, keep_executions, simulation_of
from trainatomy.runs.executors import SubmitsTasks, open_workers
from trainatomy.runs.pools import KEPT_RUNS, RelatedProcesses, process_pools
from trainatomy.workload.arguments import arguments, is_class_path
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.requests.predicting import PredictRequest
    from trainatomy.simulator.simulation import Execution, Simulation

    Result = Prediction | TrainatomyError


SCHEMA = "trainatomy/kept-prediction/1"
_DIGITS = 24


@dataclass(frozen=True)
class Kept:
    """A function that predicts, and keeps what it predicted; it can be sent to other processes and machines.

    A prediction is found again by its workload, the options, and the versions of all libraries, trainatomy's too.
    Predictions with code of the user's are not kept, because that code may change.

    Attributes:
        predict: Predicts one workload.
        options: How it predicts.
        place: Folder, as a path or a URL that fsspec knows; all workers must reach it.
    """

    predict: Callable[[Workload], Prediction]
    options: PredictRequest
    place: str

    def __call__(self, workload: Workload) -> Prediction:
        """Return the prediction that is kept, or predict and keep it."""
        if _runs_user_code(workload, self.options):
            return self.predict(workload)
        folder, name = Folder(self.place, {}), self.name_of(workload)
        known = _read(folder, name)
        if known is not None:
            return known
        prediction = self.predict(workload)
        folder.write(name, json.dumps({"schema": SCHEMA, **asdict(prediction)}, default=str).encode())
        return prediction

    def name_of(self, workload: Workload) -> str:
        """Return the name of the file of a prediction."""
        described = [workload.to_mapping(), repr(self.options), installed_versions()]
        text = json.dumps(described, sort_keys=True, default=str)
        return f"prediction-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}.json"


def _runs_user_code(workload: Workload, options: PredictRequest) -> bool:
    own = (workload.model.factory, workload.data.factory, "." in workload.train.optim, workload.model.class_)
    path = str(own[3] or "")
    return options.trust_remote_code or any(own[:3]) or "." in path or ":" in path


def _read(folder: Folder, name: str) -> Prediction | None:
    """Return a prediction that is kept; None if there is none, or its file is damaged."""
    try:
        content = folder.read(name)
        if content is None:
            return None
        value: dict[str, Any] = json.loads(content)
        if value.pop("schema", None) != SCHEMA:
            return None
        return _adapter().validate_python(value)
    except (TrainatomyError, ValueError, AttributeError, ValidationError):
        return None


@cache
def _adapter() -> TypeAdapter[Prediction]:
    return TypeAdapter(Prediction)


Item = TypeVar("Item")
Epochs = TypeVar("Epochs")
"""The epochs of samples that differ in length."""

MAX_JOBS = 8
"""Processes; each holds some hundred MB of the libraries' data."""
MAX_IN_ONE_PROCESS = 3
"""Trainings that one process predicts faster than several, each of which has to be set up."""
_RECOLLECTIONS: ContextVar[deque[Any] | None] = ContextVar("_RECOLLECTIONS", default=None)
_COMPARED = (("train", "optim"), ("train", "optim_args"), ("train", "tf32"), ("model", "dtype"))
"""Keys in which training runs may differ that recall each other's runs, if those begin alike."""


def jobs_for(count: int, wanted: int | None = None) -> int:
    """Return how many processes predict ``count`` training runs: ``wanted``, or one per core up to ``MAX_JOBS``.

    Raises:
        WorkloadError: Fewer than one are wanted.
    """
    if wanted is None:
        return 1 if count <= MAX_IN_ONE_PROCESS else _cores(count)
    if wanted < 1:
        raise WorkloadError(f"jobs: {wanted} is not a number of processes; give 1 or more")
    return min(wanted, count)


def _cores(count: int) -> int:
    return max(1, min(count, os.cpu_count() or 1, MAX_JOBS))


def predict_all(
    predict: Callable[[Item], Any],
    items: Sequence[Item],
    jobs: int | None = 1,
    executor: object = None,
    kinships: Sequence[str | None] = (),
) -> list[Any]:
    """Return for each item what ``predict`` returns, or the ``TrainatomyError`` that it raises, in order.

    Args:
        predict: A function that can be pickled if there are several jobs.
        items: Workloads, or groups of them.
        jobs: Number of processes; 1 is this process. They are forked from a fresh process that has imported the
            libraries, so they do not inherit this one's state, such as CUDA.
        executor: Other workers than local processes (see ``open_workers``), of which ``jobs`` predict at a time:
            all of them by ``None``.
        kinships: What is equal for items of which one is predicted faster after another (see ``RelatedProcesses``).
    """
    if executor is not None:
        with open_workers(executor, jobs, _cores(len(items))) as workers:
            return workers.call_all(partial(_attempt, predict), items, jobs)
    if jobs is None or jobs <= 1 or len(items) <= 1:
        return [_attempt(predict, item) for item in items]
    with process_pools([1] * min(jobs, len(items)), _start_worker, _is_quiet()) as pools:
        function = partial(_attempt_in_worker, predict)
        return RelatedProcesses(pools).call_all(function, items, kinships or [None] * len(items))


class PredictionPool:
    """Processes that predict one training each at a time; with one job, this process predicts."""

    def __init__(
        self,
        predict: Callable[[Workload], Prediction],
        pool: SubmitsTasks | RelatedProcesses | None,
        jobs: int | Callable[[], int],
        *,
        on_several_gpus: bool = False,
    ) -> None:
        self._kinship = partial(_kinship, any_gpu=on_several_gpus)
        self._predict = predict
        self._pool = pool
        self._jobs = jobs

    @property
    def jobs(self) -> int:
        """How many training runs are predicted at a time; changes with the size of a cluster."""
        return self._jobs if isinstance(self._jobs, int) else self._jobs()

    def kinship(self, workload: Workload) -> str | None:
        """Return what is equal for training runs with the same micro-batches, where it helps to know."""
        return self._kinship(workload) if isinstance(self._pool, RelatedProcesses) else None

    def pick(self, kinships: Sequence[str | None]) -> int:
        """Return the place of the training to begin next: one that a free process can predict faster than others."""
        return self._pool.pick(kinships) if isinstance(self._pool, RelatedProcesses) else 0

    def submit(self, workload: Workload) -> Future[Result]:
        """Begin to predict a training; the result is its prediction, or the error in place of it."""
        if isinstance(self._pool, RelatedProcesses):
            return self._pool.submit(self._kinship(workload), _attempt_in_worker, self._predict, workload)
        if self._pool is not None:
            return self._pool.submit(_attempt, self._predict, workload)
        future: Future[Result] = Future()
        future.set_result(_attempt(self._predict, workload))
        return future


@contextmanager
def prediction_pool(
    predict: Callable[[Workload], Prediction], jobs: int | None, executor: object = None, gpus: Sequence[str] = ()
) -> Iterator[PredictionPool]:
    """Yield a pool that predicts training runs while it is open.

    Args:
        predict: Predicts one workload; can be pickled if there are several jobs.
        jobs: Number of processes; 1 is this process.
        executor: Other workers than local processes (see ``predict_all``).
        gpus: GPUs on which the same training runs are predicted; local processes execute for all of them.
    """
    if executor is not None:
        with open_workers(executor, jobs, _cores(MAX_JOBS)) as workers:
            yield PredictionPool(predict, workers, workers.count)
        return
    if jobs is None or jobs <= 1:
        token = _RECOLLECTIONS.set(deque(maxlen=KEPT_RUNS))
        try:
            with executions_kept([find_gpu(each) for each in gpus]):
                yield PredictionPool(predict, None, 1)
        finally:
            _RECOLLECTIONS.reset(token)
        return
    with process_pools([1] * jobs, _start_predicting, _is_quiet(), gpus) as pools:
        yield PredictionPool(predict, RelatedProcesses(pools), jobs, on_several_gpus=bool(gpus))


def predict_rows(
    predict: Callable[[Workload], Prediction],
    workloads: Sequence[Workload],
    jobs: int | None = 1,
    executor: object = None,
) -> list[Result]:
    """Return for each workload its prediction or the error in place of it; equal steps are simulated once.

    Args:
        predict: Predicts one workload; can be pickled if there are several jobs.
        workloads: The training runs.
        jobs: Number of processes (see ``predict_all``).
        executor: Other workers than local processes (see ``predict_all``).
    """
    groups: dict[str, list[int]] = {}
    for index, workload in enumerate(workloads):
        groups.setdefault(execution_key(workload), []).append(index)
    # The longest simulations first: the last ones then end at about the same time in all processes.
    ordered = list(groups.values())
    if jobs != 1:
        wanted = jobs or _cores(len(workloads))
        ordered = [part for group in ordered for part in _parts(group, workloads, wanted // len(ordered))]
        ordered.sort(key=lambda group: -_micro_steps(workloads[group[0]]))
    grouped = [[workloads[i] for i in group] for group in ordered]
    kinships = [_kinship(group[0]) for group in grouped]
    found = predict_all(partial(_predict_group, predict), grouped, jobs, executor, kinships)
    results: dict[int, Result] = {}
    for group, predictions in zip(ordered, found, strict=True):
        results.update(zip(group, predictions, strict=True))
    return [results[index] for index in range(len(workloads))]


def _parts(group: list[int], workloads: Sequence[Workload], most: int) -> list[list[int]]:
    """Divide workloads that may share executions among processes: those whose GPUs are alike share most."""
    count = max(1, min(most, len(group) // MAX_IN_ONE_PROCESS))
    ordered = sorted(group, key=lambda index: workloads[index].resolve_gpu().capability)
    cuts = [len(group) * part // count for part in range(count + 1)]
    return [ordered[begin:end] for begin, end in itertools.pairwise(cuts)]


def simulation_key(workload: Workload) -> str:
    """Return a key that is equal for workloads with the same simulation.

    Neither the name nor the allocator's settings change which operations run. The GPU does so only by its compute
    capability and its number of multiprocessors, unless user code asks for its name or its memory.
    """
    return _key_of(workload, workload.to_mapping())


def execution_key(workload: Workload) -> str:
    """Return a key that is equal for workloads that may share an execution (see ``runs/executions.py``).

    Where code of the user runs, or ranks on several GPUs do, only equal GPUs share one.
    """
    return _key_of(workload, workload.to_mapping(), any_gpu=_serves_others(workload))


def _serves_others(workload: Workload) -> bool:
    """Return whether an execution may serve several kinds of GPU."""
    is_spread = (
        workload.parallel.world_size > 1 or workload.parallel.devices > 1 or workload.train.deepspeed is not None
    )
    return not (_has_user_code(workload) or is_spread or workload.data.varies or workload.resumes)


def _has_user_code(workload: Workload) -> bool:
    return any((workload.model.factory, workload.data.factory, "." in workload.train.optim))


def recollections(workload: Workload) -> tuple[deque[Any], str] | None:
    """Return the runs that this process remembers, and the key of training runs that may have the same micro-batches.

    None where no runs are remembered, and for training runs whose optimizer may take part in a micro-batch: user code,
    an optimizer that updates in the backward pass, several GPUs.
    """
    runs = _RECOLLECTIONS.get()
    key = None if runs is None else _kinship(workload)
    return None if runs is None or key is None else (runs, key)


def _kinship(workload: Workload, *, any_gpu: bool = False) -> str | None:
    """Return what is equal for training runs that may have the same micro-batches, None for one without relatives.

    ``any_gpu``: on any GPU, where an execution may serve several.
    """
    optim = workload.train.optim
    user_code = workload.model.factory or workload.data.factory or is_class_path(optim)
    of_library = arguments().package_of(optim) not in (None, "bitsandbytes")
    is_spread = workload.parallel.world_size > 1 or workload.train.deepspeed is not None
    if user_code or of_library or is_spread:
        return None
    mapping = workload.to_mapping()
    for section, key in _COMPARED:
        mapping.get(section, {}).pop(key, None)
    return _key_of(workload, mapping, any_gpu=any_gpu and _serves_others(workload))


def _key_of(workload: Workload, mapping: dict[str, Any], *, any_gpu: bool = False) -> str:
    """Return a key of a mapping of a workload, without what does not change which operations run.

    ``any_gpu``: it is the same on all GPUs.
    """
    gpu = workload.resolve_gpu()
    for key in ("name", "allocator", "gpu"):
        mapping.pop(key, None)
    if any_gpu:
        return repr(mapping)
    seen_by_user = (gpu.device_name, gpu.memory_bytes) if _has_user_code(workload) else ()
    return repr((mapping, gpu.capability, gpu.multiprocessors, seen_by_user))


def shared_epochs(workload: Workload, options: object, simulate: Callable[[], Epochs]) -> Epochs:
    """Return the epochs of a workload: those of an equal one that this process keeps, else new ones."""
    kept = executions()
    return simulate() if kept is None else kept.value(f"{simulation_key(workload)} {options!r}", simulate)


def shared_simulation(
    workload: Workload, options: object, execute: Callable[[Collection[GPU]], Execution]
) -> Simulation:
    """Return the simulation of a workload: from an execution that this process keeps, else from a new one."""
    kept = executions()
    if kept is None:
        return simulation_of(execute(()), workload)
    key = f"{execution_key(workload)} {options!r}"
    return kept.simulation(workload, key, execute, is_shared=_serves_others(workload))


def _micro_steps(workload: Workload) -> int:
    """Return a rough measure of how long the simulation takes."""
    train = workload.train
    return min(train.gradient_accumulation_steps, 4) * (3 if train.gradient_checkpointing else 2)


def _predict_group(predict: Callable[[Workload], Prediction], workloads: Sequence[Workload]) -> list[Result]:
    if len(workloads) == 1:
        return [_attempt(predict, workloads[0])]
    gpus = [workload.resolve_gpu() for workload in workloads]
    # those with the same allocations one after the other, as the last trace is kept
    order = sorted(range(len(gpus)), key=lambda place: gpus[place].multiprocessors)
    with executions_kept(gpus):
        found = {place: _attempt(predict, workloads[place]) for place in order}
    return [found[place] for place in range(len(gpus))]


def _attempt(predict: Callable[[Item], Any], item: Item) -> Any:
    try:
        return predict(item)
    except TrainatomyError as error:
        return error


def _attempt_in_worker(predict: Callable[[Item], Any], item: Item) -> Any:
    """Predict in a process whose collections of garbage are off, and collect that of the prediction."""
    try:
        return _attempt(predict, item)
    finally:
        gc.collect()
        gc.freeze()  # what is left, such as executions that are kept, need not be searched again


def _is_quiet() -> bool:
    return logging.root.manager.disable >= logging.ERROR


def _start_worker(is_quiet: bool) -> None:
    """Send what libraries print to stderr, and leave out what takes time."""
    os.dup2(2, 1)
    _RECOLLECTIONS.set(deque(maxlen=KEPT_RUNS))
    gc.disable()
    if is_quiet:
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")


def _start_predicting(is_quiet: bool, gpus: Sequence[str]) -> None:
    """Prepare a process that predicts many training runs on several GPUs."""
    _start_worker(is_quiet)
    keep_executions([find_gpu(each) for each in gpus])
