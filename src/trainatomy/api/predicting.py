"""Predict one training, given as a workload or as a live module."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trainatomy.api.elsewhere import changed
from trainatomy.api.verb import verb
from trainatomy.catalog.gpus import GPU
from trainatomy.errors import WorkloadError
from trainatomy.prediction.assemble import prediction_of, rank_prediction_of
from trainatomy.prediction.lengths import prediction_of_lengths, with_lengths
from trainatomy.prediction.pipeline import pipeline_prediction
from trainatomy.requests.predicting import Batch, PredictRequest, Training
from trainatomy.results.prediction import Prediction
from trainatomy.runs.executions import simulation_of
from trainatomy.runs.predicting import recollections, shared_epochs, shared_simulation
from trainatomy.simulator import live
from trainatomy.simulator.lengths import simulate_lengths
from trainatomy.simulator.micro_batches import Recollections
from trainatomy.simulator.simulate import ExecutionOptions, execute, simulate, topology_of
from trainatomy.simulator.simulation import Execution, Simulation
from trainatomy.simulator.watcher import Watcher
from trainatomy.training.batch import MakeBatch
from trainatomy.training.factory import user_code
from trainatomy.workload.arguments import check_keywords
from trainatomy.workload.schema import Workload


def with_batch(
    workload: Workload, batch: Batch | None, settings: Mapping[str, Any]
) -> tuple[Workload, MakeBatch | None]:
    """Return the workload for an explicit batch, and the function that makes it; the batch replaces ``data``."""
    if batch is None:
        return workload, None
    make_batch, size = live.batches_of(batch)
    is_eval = workload.mode != "training" and workload.train.per_device_eval_batch_size is not None
    name = "per_device_eval_batch_size" if is_eval else "per_device_train_batch_size"
    if size is not None and settings.get(name, size) != size:
        raise WorkloadError(f"{name}={settings[name]}, but the batch holds {size} samples", key=f"train.{name}")
    changes: dict[str, Any] = {"data": {}}
    if size is not None:
        changes[f"train.{name}"] = size
    return workload.replace(changes), make_batch


@verb(PredictRequest)
def predict(
    what: Workload | nn.Module,
    *,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | Callable[[Any], Any] | None = None,
    gpu: str | None = None,
    request: PredictRequest,
    on_progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Prediction:
    """Predict, without a GPU, what one training step holds in GPU memory and how long it takes.

    Args:
        what: A workload, or a live module, which is neither changed nor moved.
        batch: A mapping of tensors (on any device; only shapes, dtypes and the values of small integer tensors
            matter; on meta, whole numbers count as 1), or a function of the batch size that returns one. A transformers
            model and a workload need none.
        optimizer: A name of ``TrainingArguments.optim``, an optimizer class, or a function of the model that returns
            an optimizer or several (several need ``loop="pytorch"``).
        gpu: The GPU to predict for.
        request: How to predict it.
        on_progress: Called with what is being done while samples of different lengths are predicted.
        **settings: Settings by their name in ``TrainingArguments`` (``bf16=True``, ``gradient_accumulation_steps=4``),
            and sections of a workload (``loop="trainer"``, ``data={"sequence_length": 512}``). They override those of
            a workload. The loop of a module is "pytorch" by default.

    Raises:
        WorkloadError: The description is wrong: an unknown setting, a contradiction, an argument of the wrong type.
        MissingLibrary: An optional library is needed.
        NetworkError: The hub cannot be reached.
        FactoryError: The user's code raised.
        SimulationError: An operation needs data that a run without a GPU does not have.
    """
    return predict_training(Training(what, batch, optimizer, gpu, settings), request, on_progress)


def predict_training(
    training: Training, request: PredictRequest, on_progress: Callable[[str], None] | None = None
) -> Prediction:
    """Predict a training as it is asked for (see ``predict``)."""
    started, what = time.perf_counter(), training.what
    if not isinstance(what, Workload):
        if request.ranks:
            raise WorkloadError("ranks: a live module is predicted on one GPU; describe the training by a workload")
        workload, make_batch = live.described(what, training.batch, training.optimizer, training.gpu, training.settings)
        return predict_module(what, make_batch, request, workload, started, on_progress)
    check_keywords(training.batch, training.optimizer)
    workload = changed(what, training.optimizer, training.gpu, training.settings)
    workload, make_batch = with_batch(workload, training.batch, training.settings)
    request.check_calibration([workload])
    _refuse_missing(workload, request.ranks)
    run = partial(_simulate_workload, workload, make_batch, request)
    if workload.parallel.pp_size > 1:
        prediction = pipeline_prediction(workload, run, request, started)
    elif workload.data.varies:
        return _predict_lengths(workload, make_batch, request, started, on_progress)
    else:
        prediction = _assemble(workload, run(), request, started)
    return _with_other_ranks(prediction, workload, make_batch, request, started) if request.ranks else prediction


def _refuse_missing(workload: Workload, ranks: Sequence[int]) -> None:
    """Refuse ranks that a training does not have besides rank 0."""
    size = workload.parallel.world_size
    if wrong := [rank for rank in ranks if not 0 < rank < size]:
        raise WorkloadError(
            f"ranks: {wrong[0]} is none of this training's other ranks (1 to {size - 1})"
            if size > 1
            else f"ranks: {wrong[0]} does not exist: the training is on one GPU (parallel.gpus)",
            key="ranks",
        )


def _with_other_ranks(
    prediction: Prediction, workload: Workload, make_batch: MakeBatch | None, request: PredictRequest, started: float
) -> Prediction:
    """Return a prediction with the memory of further ranks."""
    found = list(prediction.other_ranks)
    for rank in dict.fromkeys(rank for rank in request.ranks if rank not in prediction.ranks):
        simulation = simulate(
            workload,
            workload.resolve_gpu(),
            make_batch=make_batch,
            trust_remote_code=request.trust_remote_code,
            operations=False,
            topology=topology_of(workload, rank),
        )
        found.append(rank_prediction_of(workload, simulation, request))
    return replace(prediction, other_ranks=tuple(found), seconds_taken=time.perf_counter() - started)


def predict_module(
    module: nn.Module,
    make_batch: MakeBatch | None,
    request: PredictRequest,
    workload: Workload,
    started: float | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Prediction:
    """Predict a live module that trains as its workload says."""
    started = time.perf_counter() if started is None else started
    request.check_calibration([workload])
    if workload.data.varies:
        return _predict_lengths(workload, make_batch, request, started, on_progress, module=module)
    return _assemble(workload, _simulate_module(module, workload, make_batch, request), request, started)


def _assemble(workload: Workload, simulation: Simulation, request: PredictRequest, started: float) -> Prediction:
    found = prediction_of(workload, simulation, request, started)
    return found if workload.data.lengths is None else with_lengths(workload, found)


def _predict_lengths(
    workload: Workload,
    make_batch: MakeBatch | None,
    request: PredictRequest,
    started: float,
    on_progress: Callable[[str], None] | None,
    module: nn.Module | None = None,
) -> Prediction:
    """Return the prediction of a training whose samples differ in length."""
    if make_batch is not None:
        raise WorkloadError("data.lengths: cannot be combined with a batch, which has one length", key="data.lengths")
    tell = on_progress or (lambda message: None)
    run = partial(
        simulate_lengths,
        workload,
        workload.resolve_gpu(),
        model=None if module is None else partial(live.on_meta, module),
        trust_remote_code=request.trust_remote_code,
        operations=request.timed,
        tell=tell,
    )
    key = (request.trust_remote_code, request.timed)
    epochs = run() if module is not None else shared_epochs(workload, key, run)
    return prediction_of_lengths(workload, epochs, request, started, tell)


def _simulate_workload(
    workload: Workload, make_batch: MakeBatch | None, request: PredictRequest, rank: int = 0
) -> Simulation:
    known = recollections(workload) if make_batch is None else None
    goes_on = known is None or bool(request.layouts)  # a search ranks candidates by the steps that are executed
    how = ExecutionOptions(
        make_batch=make_batch,
        trust_remote_code=request.trust_remote_code,
        operations=request.timed,
        topology=topology_of(workload, rank),
        watch=Watcher if known is None else partial(Watcher, recollections=Recollections(*known)),
        goes_on=goes_on,
    )

    def run(others: Collection[GPU] = ()) -> Execution:
        return execute(workload, workload.resolve_gpu(), replace(how, others=others))

    if make_batch is not None:
        return simulation_of(run(), workload)
    key = (request.trust_remote_code, request.timed, rank, goes_on)
    return shared_simulation(workload, key, run)


def _simulate_module(
    module: nn.Module, workload: Workload, make_batch: MakeBatch | None, request: PredictRequest
) -> Simulation:
    with user_code(f"{type(module).__name__}: its forward"):
        return simulate(
            workload,
            workload.resolve_gpu(),
            model=lambda: live.on_meta(module),
            make_batch=make_batch,
            operations=request.timed,
        )
