"""Predict a pipeline: execute each distinct rank, follow the schedule over all of them, and bill the fullest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.analysis.memory import MemoryAnalysis
from trainatomy.catalog.calibrations import Calibration
from trainatomy.operators.cost.communication import collective_seconds
from trainatomy.prediction.assemble import analysis_of, prediction_of, rank_prediction_of, step_of
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.prediction import Prediction
from trainatomy.results.time import PacedStep, Pipeline
from trainatomy.timing.pipeline import schedule, stage_seconds
from trainatomy.training.parallel.pipeline import layers_by_stage, order_of_work
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.simulator.simulation import Simulation


class _Rank(NamedTuple):
    """A rank that was executed."""

    simulation: Simulation
    analysis: MemoryAnalysis


def pipeline_prediction(
    workload: Workload, simulate_rank: Callable[[int], Simulation], request: PredictRequest, started: float
) -> Prediction:
    """Return the prediction of the fullest rank of a pipeline, with those of the other distinct ones.

    If ranks are asked for, that of rank 0 instead.  The CPUs of all ranks are taken to have the same pace.

    Args:
        workload: The training.
        simulate_rank: Executes a rank.
        request: What is to be predicted, and how; where it asks for ranks, rank 0 is billed instead of the fullest.
            The CPUs of all ranks are taken to have the same pace.
        started: See ``prediction_of``.
    """
    calibration = request.calibration
    parallel = workload.parallel
    first = simulate_rank(0)
    alike = ranks_alike(parallel, first.layers)
    found: dict[int, _Rank] = {}
    for stage in dict.fromkeys(alike):
        simulation = simulate_rank(stage * parallel.ranks_per_stage) if stage else first
        found[stage] = _Rank(simulation, analysis_of(workload, simulation, calibration))
    main = 0 if request.ranks else max(found, key=lambda each: found[each].analysis.memory.device_bytes)
    in_order = [found[stage] for stage in alike]
    step = _step(workload, in_order, calibration) if request.timed else None
    prediction = prediction_of(
        workload,
        found[main].simulation,
        replace(request, host_paces=(), layouts=True),
        started,
        analysis=found[main].analysis,
        pipeline=step,
    )
    if prediction.time is not None:
        steps = (
            PacedStep(pace, _step(workload, in_order, calibration, pace).step_seconds)
            for pace in sorted(request.host_paces)
        )
        prediction = replace(prediction, time=replace(prediction.time, at_paces=tuple(steps)))
    others = tuple(
        rank_prediction_of(workload, each.simulation, request, each.analysis)
        for stage, each in found.items()
        if stage != main
    )
    return replace(prediction, other_ranks=others, notes=(*prediction.notes, *_notes(parallel, alike)))


def ranks_alike(parallel: ParallelSpec, layers: int) -> list[int]:
    """Return for each rank of a pipeline the first one with as many layers, embeddings and output layers.

    In PyTorch's schedules, earlier ranks have as many micro-batches in flight as later ones, or more; so of ranks with
    equal stages the first one holds most.
    """
    count, size = parallel.stages, parallel.pp_size
    sizes = layers_by_stage(layers, count)
    kinds = [
        tuple((index == 0, sizes[index], index == count - 1) for index in range(rank, count, size))
        for rank in range(size)
    ]
    return [kinds.index(kind) for kind in kinds]


def _step(workload: Workload, ranks: Sequence[_Rank], calibration: Calibration | None, pace: float = 1.0) -> Pipeline:
    """Return the time of a step of the whole pipeline, from what each rank does (equal ones repeated)."""
    parallel = workload.parallel
    seconds = {
        id(rank): stage_seconds(
            step_of(workload, rank.simulation, rank.simulation.operations, calibration, rank.analysis.driver_calls),
            parallel.pp_size,
            pace,
        )
        for rank in {id(rank): rank for rank in ranks}.values()
    }
    order = order_of_work(parallel.schedule, parallel.pp_size, parallel.stages_per_rank, workload.microbatches)
    of_ranks = [seconds[id(rank)] for rank in ranks]
    together = workload.train.max_grad_norm > 0
    found = schedule(order, of_ranks, _message_seconds(workload, ranks[0].simulation), together=together)
    return Pipeline(
        parallel.schedule,
        parallel.stages,
        workload.microbatches,
        found.step,
        found.bubble_share,
        tuple(rank.total for rank in of_ranks),
    )


def _message_seconds(workload: Workload, simulation: Simulation) -> Callable[[int, int], float]:
    """Return the function from two ranks of a pipeline to the time of a message between them."""
    parallel = workload.parallel
    links = parallel.links(workload.resolve_gpu())
    sizes = [int(dict(call.numbers)["bytes"]) for call in simulation.operations.calls if call.name == "nccl::send"]
    per_stage = parallel.ranks_per_stage

    def seconds(sender: int, receiver: int) -> float:
        machines = {rank * per_stage // parallel.gpus for rank in (sender, receiver)}
        return 0.0 if links is None else collective_seconds("send", max(sizes, default=0), 2, len(machines), links)

    return seconds


def _notes(parallel: ParallelSpec, alike: Sequence[int]) -> list[str]:
    """Return notes on the ranks that were not executed."""
    per_stage = parallel.ranks_per_stage
    notes = []
    for stage in dict.fromkeys(alike):
        others = [str(rank * per_stage) for rank, first in enumerate(alike) if first == stage != rank]
        if others:
            notes.append(
                f"rank{'s' * (len(others) > 1)} {', '.join(others)}: layers as in rank {stage * per_stage}, at "
                "most as many micro-batches in flight; not executed (--ranks executes them)"
            )
    return notes
