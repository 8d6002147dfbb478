"""Find the settings that fit: the library's functions with their keywords."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.api.comparing import measure_comparison
from trainatomy.api.measuring import this_gpu
from trainatomy.api.searching import SearchRequest, search_gpus, search_remedies, search_settings
from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.errors import WorkloadError
from trainatomy.runs.options import PredictOptions, RunOptions
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.api.keywords import Batch
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.fit import Fit, FitAcross, Goal, Permission, Shortage
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.plan import Finished, RunObserver
    from trainatomy.search.axes import CanApply
    from trainatomy.search.execution import Observer


def fit(
    what: Workload | nn.Module,
    *,
    effective_batch_size: int | None = None,
    gpu: str | None = None,
    allow: Sequence[Permission] = (),
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    maximize: Goal = "throughput",
    measure: int = 0,
    exhaustive: bool = False,
    can_apply: CanApply | None = None,
    prices: bool = True,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    executor: object = None,
    progress: Observer | None = None,
    **settings: Any,
) -> Fit:
    """Find, without a GPU, the settings that fit a GPU and train fastest.

    The effective batch size (samples per optimizer step), the model, the optimizer and the length of sequences stay as
    they are; ``allow`` lists what may change.  After Ctrl-C the outcome is the best so far.

    Args:
        what: A workload, or a live module, which is neither changed nor moved.
        effective_batch_size: Samples per optimizer step; by default those of the workload.
        gpu: The GPU.
        allow: Changes of what is trained that the search may make: "precision", "optimizer", "lora",
            "quantization", "sequence-length", "evaluation".
        headroom: Share of the GPU's memory that must stay free.
        keep: Settings that the search may not vary, such as "gradient_checkpointing" or "attention"
            (``trainatomy.search.axes`` lists them).
        maximize: "throughput", or "batch", "sequence-length", "model-size": the largest one that fits.
        measure: Run this many of the best candidates on this machine's GPU, which is then the default of ``gpu``.
        exhaustive: Execute every candidate instead of leaving out those that cannot win.
        can_apply: A function that gets the settings of an option, keys of the workload with their values, and returns
            whether the caller can apply them; other options are left out.
        prices: Execute the single changes of the best settings too, for what each costs or saves.
        batch: For a module: see ``predict``.  A mapping is repeated or cut to other batch sizes.
        optimizer: See ``predict``.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        jobs: Processes that predict in parallel, for a workload: by default this one or, with ``executor``, all that it
            has.  A script that asks for several must start its own work behind ``if __name__ == "__main__"``.
        executor: For a workload: where to predict in place of local processes (see ``compare``).
        progress: Receives the progress.
        **settings: Settings as in ``predict``.

    Raises:
        WorkloadError: The description is wrong, or it contradicts the GPU or the other arguments.
        TrainatomyError: The errors of ``predict`` and, with ``measure``, of ``compare``.
    """
    from trainatomy.search.options import SearchOptions

    if measure and not isinstance(what, Workload):
        raise WorkloadError(
            "measure: candidates run in fresh processes, which cannot be handed a module; give a workload whose "
            "model.factory builds it"
        )
    gpu = gpu or (this_gpu() if measure else None)
    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    options = SearchOptions(effective_batch_size, headroom, tuple(allow), tuple(keep), exhaustive, prices, can_apply)
    request = SearchRequest(what, options, predict_options, batch, optimizer, gpu, settings, jobs, progress, executor)
    found = search_settings(request, maximize)
    return measure_fit(found, measure, predict_options, RunOptions()) if measure else found


def fit_gpus(
    what: Workload | nn.Module,
    gpus: Sequence[str] | None = None,
    *,
    costs_per_hour: Mapping[str, float] | None = None,
    effective_batch_size: int | None = None,
    allow: Sequence[Permission] = (),
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    executor: object = None,
    progress: Observer | None = None,
    **settings: Any,
) -> FitAcross:
    """Find, without a GPU, which GPUs can run a training, how fast with the best settings there, and at what cost.

    Args:
        what: See ``fit``.
        gpus: Names of GPUs; all known ones by default.
        costs_per_hour: Prices per hour by the GPU's name, in any currency.
        effective_batch_size: See ``fit``, as for the arguments below.
        allow: See ``fit``.
        headroom: See ``fit``.
        keep: See ``fit``.
        batch: See ``fit``.
        optimizer: See ``fit``.
        calibration: See ``fit``.
        trust_remote_code: See ``fit``.
        jobs: See ``fit``.
        executor: See ``fit``.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    from trainatomy.search.options import SearchOptions

    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    options = SearchOptions(effective_batch_size, headroom, tuple(allow), tuple(keep))
    request = SearchRequest(what, options, predict_options, batch, optimizer, None, settings, jobs, progress, executor)
    return search_gpus(request, gpus, costs_per_hour)


def why_out_of_memory(
    what: Workload | nn.Module,
    *,
    gpu: str | None = None,
    headroom: float = 0.05,
    keep: Sequence[str] = (),
    prediction: Prediction | None = None,
    batch: Batch | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    calibration: Calibration | Path | str | None = None,
    trust_remote_code: bool = False,
    jobs: int | None = None,
    executor: object = None,
    progress: Observer | None = None,
    **settings: Any,
) -> Shortage:
    """Say what a training needs that does not fit, and list what would make it fit, each change with its effect.

    Args:
        what: See ``fit``, as for the arguments below.
        gpu: See ``fit``.
        headroom: See ``fit``.
        keep: See ``fit``.
        prediction: The prediction of the training with its time and timeline, if there is one: it is not made again.
        batch: See ``fit``.
        optimizer: See ``fit``.
        calibration: See ``fit``.
        trust_remote_code: See ``fit``.
        jobs: See ``fit``.
        executor: See ``fit``.
        progress: See ``fit``.
        **settings: See ``fit``.

    Raises:
        TrainatomyError: The errors of ``fit``.
    """
    from trainatomy.search.options import SearchOptions

    predict_options = PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration))
    options = SearchOptions(headroom=headroom, keep=tuple(keep))
    request = SearchRequest(what, options, predict_options, batch, optimizer, gpu, settings, jobs, progress, executor)
    return search_remedies(request, prediction)


def measure_fit(
    found: Fit,
    count: int,
    predict_options: PredictOptions,
    run_options: RunOptions,
    *,
    progress: Callable[[Finished], None] | RunObserver | None = None,
) -> Fit:
    """Run the best candidates of a search on this machine's GPU, and return the outcome with their measurements.

    Args:
        found: The outcome of a search.
        count: How many candidates to run: the best one and the next best ones (``Fit.runner_ups``).
        predict_options: How to predict.
        run_options: How to run.
        progress: See ``compare``.

    Raises:
        TrainatomyError: The errors of ``compare``.
    """
    if found.best is None:
        return found
    candidates = (found.best, *found.runner_ups)[:count]
    workloads = [Workload.from_mapping({**each.workload, "name": each.name}) for each in candidates]
    options = replace(run_options, keep_gpus=True, title=run_options.title or "fit")
    return replace(found, measured=measure_comparison(workloads, predict_options, options, progress=progress))
