"""Workers of other libraries that predict: Dask, Ray, or an executor of the caller's.

Each is reduced to one interface: ``Executor.submit`` of ``concurrent.futures``, and how many predictions run at a time.
A prediction whose worker dies is repeated on another one.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast
from unittest import mock

from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.libraries import import_library, installed_versions

RETRIES = 3
"""How often a prediction is repeated after its worker died."""
CONNECT_SECONDS = 30
"""How long to wait for a scheduler to answer."""
_ENVIRONMENT = ("CUBLAS", "TORCH_CUBLAS", "PYTORCH_CUDA", "PYTORCH_NO_CUDA", "ACCELERATE_")
"""Prefixes of environment variables that change a prediction; workers get those of this process."""
_one_at_a_time = threading.Lock()

Surroundings = Callable[[], AbstractContextManager[None]]


class SubmitsTasks(Protocol):
    """Part of ``concurrent.futures.Executor`` that predictions need."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begin to call a function, and return its future."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Executor of predictions.

    Attributes:
        executor: Calls functions in other processes.
        count: Returns how many predictions run at a time; a cluster may grow and shrink.
        surroundings: Returns the context of a prediction in its worker.
    """

    executor: SubmitsTasks
    count: Callable[[], int]
    surroundings: Surroundings

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Begin to call a function in a worker.

        Raises:
            WorkloadError: The executor's futures are not those of ``concurrent.futures``.
        """
        future = self.executor.submit(_called_inside, self.surroundings, function, *arguments)
        if not isinstance(future, Future):
            raise WorkloadError(
                f"executor: {type(self.executor).__name__}.submit returned {type(future).__name__}, not a "
                "concurrent.futures.Future; give an executor of concurrent.futures, a distributed.Client or an address"
            )
        return future

    def call_all(self, function: Callable[[Any], Any], items: Sequence[Any], most: int | None = None) -> list[Any]:
        """Return what a function returns for each item, in order.

        Args:
            function: Called in the workers.
            items: Its arguments.
            most: How many calls to submit at a time; all by default, so that a cluster can grow with them.
        """
        results: dict[int, Any] = {}
        running: dict[Future[Any], int] = {}
        for index, item in enumerate(items):
            running[self.submit(function, item)] = index
            while running and most is not None and len(running) >= most:
                _collect(running, results)
        while running:
            _collect(running, results)
        return [results[index] for index in range(len(items))]


def _collect(running: dict[Future[Any], int], results: dict[int, Any]) -> None:
    """Wait until a call ends, and move those that have to the results."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        results[running.pop(future)] = future.result()


@contextmanager
def open_workers(executor: object, jobs: int | None, default_jobs: int) -> Iterator[Workers]:
    """Yield the workers that ``executor`` names; end them afterwards if they were started here.

    Args:
        executor: ``"dask"`` or ``"ray"`` (started on this machine), the address of a cluster (``dask://HOST:PORT``,
            ``tcp://…``, ``tls://…``, ``ray://…``), a ``distributed.Client``, or an executor of ``concurrent.futures``.
        jobs: Predictions at a time; ``None`` for as many as the executor has workers.
        default_jobs: Workers that are started on this machine where ``jobs`` is ``None``.

    Raises:
        WorkloadError: The executor is not one of these.
        MissingLibrary: Dask or Ray is not installed.
        TrainatomyError: The cluster does not answer, or a worker died again and again.
    """
    if jobs is not None and jobs < 1:
        raise WorkloadError(f"jobs: {jobs} is not a number of processes; give 1 or more")
    with _deaths_explained(), _workers(executor, jobs, default_jobs) as workers:
        yield workers


def _workers(executor: object, jobs: int | None, default_jobs: int) -> AbstractContextManager[Workers]:
    """Return the context of the workers that ``executor`` names."""
    scheme, _, address = executor.partition("://") if isinstance(executor, str) else ("", "", "")
    if executor == "dask":
        return _local_dask(jobs or default_jobs)
    if scheme in ("dask", "tcp", "tls") and address:
        return _dask_at(f"{'tcp' if scheme == 'dask' else scheme}://{address}", jobs)
    if executor == "ray":
        return _ray(None, jobs, default_jobs)
    if scheme == "ray" and address:
        return _ray(f"ray://{address}", jobs, default_jobs)
    if isinstance(executor, str) or not hasattr(executor, "submit"):
        raise WorkloadError(
            f"executor: {executor!r} is none of dask, ray, dask://HOST:PORT, tcp://HOST:PORT, ray://HOST:PORT, "
            "a distributed.Client or an executor of concurrent.futures; without one, local processes predict"
        )
    return _given(executor, jobs)


@contextmanager
def _local_dask(jobs: int) -> Iterator[Workers]:
    """Start a Dask cluster on this machine, with one process for each prediction at a time."""
    distributed = _import_dask()
    options = {"n_workers": jobs, "threads_per_worker": 1, "processes": True, "memory_limit": None}
    with (
        distributed.LocalCluster(**options, dashboard_address=":0", silence_logs=logging.CRITICAL) as cluster,
        distributed.Client(cluster) as client,
        _submitting(client) as executor,
    ):
        yield Workers(executor, lambda: jobs, partial(_own_process, _is_quiet()))


@contextmanager
def _dask_at(address: str, jobs: int | None) -> Iterator[Workers]:
    """Connect to a running scheduler."""
    distributed = _import_dask()
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise TrainatomyError(
            f"executor: no Dask scheduler answers at {address} ({error}); start one with `dask scheduler`"
        ) from error
    with client, _given(client, jobs) as workers:
        yield workers


@contextmanager
def _ray(address: str | None, jobs: int | None, default_jobs: int) -> Iterator[Workers]:
    """Use the Ray that this process is connected to, or else connect to ``address``, or start Ray on this machine."""
    ray = import_library("ray", "executor: ray", install="'trainatomy[ray]'")
    is_own = not ray.is_initialized()
    is_started = is_own and address is None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if is_started:
        options |= {"address": "local", "num_cpus": jobs or default_jobs, "num_gpus": 0, "include_dashboard": False}
    elif is_own:
        options |= {"address": address}
    if is_own:
        try:
            ray.init(**options)
        except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError) as error:
            raise TrainatomyError(f"executor: cannot use Ray at {address or 'this machine'}: {error}") from error
    executor = _RayExecutor(ray)
    try:
        surroundings = partial(_own_process, _is_quiet()) if is_started else _like_here()
        yield Workers(executor, lambda: jobs or int(ray.cluster_resources().get("CPU", 1)) or 1, surroundings)
    finally:
        executor.shutdown()
        if is_own:
            ray.shutdown()


@contextmanager
def _given(executor: Any, jobs: int | None) -> Iterator[Workers]:
    """Use an executor or a client that outlives the predictions."""
    if hasattr(executor, "get_executor") and hasattr(executor, "nthreads"):  # a distributed.Client
        with _submitting(executor) as submitting:
            yield Workers(submitting, lambda: jobs or len(executor.nthreads()) or 1, _like_here())
        return
    count = jobs or getattr(executor, "_max_workers", None) or os.cpu_count() or 1
    yield Workers(cast("SubmitsTasks", executor), lambda: count, _like_here())


@contextmanager
def _submitting(client: Any) -> Iterator[Executor]:
    """Yield a client as an executor; predictions that nobody waits for are cancelled at the end."""
    executor = client.get_executor(retries=RETRIES, pure=False)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False)


class _RayExecutor(Executor):
    """Ray's tasks as an executor; a worker runs one at a time."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._running: dict[Future[Any], Any] = {}
        self._call = ray.remote(_call).options(num_cpus=1, max_retries=RETRIES)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        reference = self._call.remote(function, arguments, keywords)
        future: Future[Any] = reference.future()
        self._running[future] = reference
        future.add_done_callback(lambda done: self._running.pop(done, None))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel what still runs."""
        for reference in list(self._running.values()):
            self._ray.cancel(reference, force=True)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    return function(*arguments, **keywords)


def _import_dask() -> Any:
    return import_library("distributed", "executor: dask", install="'trainatomy[dask]'")


@contextmanager
def _deaths_explained() -> Iterator[None]:
    """Turn errors that say that workers or their cluster are gone into ``TrainatomyError``."""
    try:
        yield
    except (CancelledError, BrokenProcessPool) as error:
        raise TrainatomyError("executor: the workers are gone; is the cluster still running?") from error
    except Exception as error:
        if any("No module named 'trainatomy" in str(each) for each in (error, error.__cause__)):
            raise TrainatomyError(
                "executor: a worker has no trainatomy; install the version of this machine there"
            ) from error
        names = {each.__name__ for each in type(error).__mro__}
        if "RayTaskError" in names and isinstance(cause := getattr(error, "cause", None), Exception):
            raise cause from error  # what the function itself raised
        if not names & {"KilledWorker", "RayError"}:
            raise
        raise TrainatomyError(
            "executor: a prediction was given up because its worker died each time that it was repeated, perhaps for "
            f"lack of host memory ({type(error).__name__}). Give each worker more memory, or start fewer on a machine"
        ) from error


def _is_quiet() -> bool:
    return logging.root.manager.disable >= logging.ERROR


def _called_inside(surroundings: Surroundings, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a worker; threads of one process wait for each other."""
    with _not_sampled(), _one_at_a_time, surroundings():
        return function(*arguments)


@contextmanager
def _not_sampled() -> Iterator[None]:
    """Keep the profiler of a Dask worker away from this thread.

    It holds a thread's frames for a moment, and with them tensors that the thread has let go, which would be freed
    late.  Source: ``Worker.trigger_profile`` (distributed/worker.py, 2024.8-2026.8).
    """
    distributed = sys.modules.get("distributed")
    worker: Any = None
    if distributed is not None:
        with suppress(ValueError):  # not in a worker
            worker = distributed.get_worker()
    if not hasattr(worker, "active_threads"):
        yield
        return
    with worker.active_threads_lock:
        task = worker.active_threads.pop(threading.get_ident(), None)
    try:
        yield
    finally:
        if task is not None:
            with worker.active_threads_lock:
                worker.active_threads[threading.get_ident()] = task


@contextmanager
def _own_process(is_quiet: bool) -> Iterator[None]:
    """Send what libraries print in a worker that was started here to stderr."""
    os.dup2(2, 1)
    if is_quiet:
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
    yield


def _like_here() -> Surroundings:
    """Return what makes a worker of somebody else's predict as this process does, or refuse to."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    return partial(_like, installed_versions(), settings)


@contextmanager
def _like(versions: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[None]:
    """Check a worker's libraries, and give it the environment variables that change a prediction.

    Raises:
        TrainatomyError: A library has another version here. A build (``+cu130``) does not matter.
    """
    here = installed_versions()
    differ = [
        f"{name} {here[name]} instead of {version}"
        for name, version in versions.items()
        if name != "python" and name in here and here[name].split("+")[0] != version.split("+")[0]
    ]
    if differ:
        raise TrainatomyError(
            f"executor: the worker on {platform.node()} has {', '.join(differ)}, and predictions depend on versions; "
            "install the same ones"
        )
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(_ENVIRONMENT)]:
            del os.environ[name]
        os.environ.update(settings)
        yield
