"""A measured comparison: predictions, runs on this machine's GPU, and both side by side.

Figures that others published for the training runs of a built-in comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.published import (
    mixed_precision_by_batch,
    mixed_precision_machine,
    mixed_precision_remark,
    parallel_runs,
)
from trainatomy.catalog.published import notebook as published_notebook
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.measurement import measure as gpu
from trainatomy.measurement.process.job import Job, Task
from trainatomy.measurement.process.pool import Processes
from trainatomy.records.store import Store, store_of
from trainatomy.results.comparison import Comparison, ComparisonRow, PublishedFigures
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.runs import single as machines
from trainatomy.runs.plan import Finished, Plan, RunObserver, group_name, on_record, run
from trainatomy.runs.single import Machine
from trainatomy.workload.builtin import NOTEBOOK, PARALLEL, READY, ready
from trainatomy.workload.measurable import measurable, refuse_era
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.requests.comparing import CompareRequest


MIB = 2**20


@dataclass(frozen=True, slots=True)
class Published:
    """Published figures, one for each workload, or none.

    Attributes:
        source: Where they were published.
        remark: What to know before comparing ours with them.
        samples: Number of samples that their times are given for.
        rows: The figures.
    """

    source: str = ""
    remark: str = ""
    samples: int | None = None
    rows: tuple[PublishedFigures, ...] = ()


def published(workloads: Sequence[Workload]) -> Published:
    """Return the figures for the rows of a built-in comparison with its own GPU and era; else nothing.

    Those of the experiment on two GPUs are about the ratios between its rows, and returned for every GPU.
    """
    name = next((name for name in READY if list(workloads) == list(ready(name, "2022"))), None)
    if name is None:
        beside = published_beside(workloads)
        return beside if beside.source == parallel_runs().source else Published()
    return _figures(name)


def published_beside(workloads: Sequence[Workload]) -> Published:
    """Return the figures for the rows of a built-in comparison with today's libraries on any GPU; else nothing.

    The remark names the GPU and the software of the figures.
    """
    mappings = [_without_gpu(workload) for workload in workloads]
    name = next((name for name in READY if mappings == [_without_gpu(row) for row in ready(name)]), None)
    if name is None:
        return Published()
    known = _figures(name)
    table = published_notebook()
    theirs = f"{find_gpu(table.gpu).name}, the software of {table.software['date']}"
    others = {NOTEBOOK: theirs, PARALLEL: parallel_runs().machine}
    machine = others.get(name) or mixed_precision_machine()
    remark = f"The published figures were measured on another machine ({machine}) and need not agree with this one."
    return Published(known.source, remark, known.samples, known.rows)


def _figures(name: str) -> Published:
    if name == NOTEBOOK:
        table = published_notebook()
        rows = [PublishedFigures(row.memory_bytes, row.seconds, row.samples_per_second) for row in table.rows]
        return Published(table.source, "", table.samples, tuple(rows))
    if name == PARALLEL:
        runs = parallel_runs()
        times = [
            PublishedFigures(None, each, runs.samples / each, note)
            for each, note in zip(runs.seconds, runs.notes, strict=True)
        ]
        return Published(runs.source, runs.remark, runs.samples, tuple(times))
    source, by_batch = mixed_precision_by_batch()
    sizes = [size for row in by_batch for size in (row.fp32_mb, row.fp16_mb)]
    return Published(source, mixed_precision_remark(), None, tuple(PublishedFigures(size * MIB) for size in sizes))


def _without_gpu(workload: Workload) -> dict[str, object]:
    return {key: value for key, value in workload.to_mapping().items() if key != "gpu"}


class ComparisonInterrupted(KeyboardInterrupt):
    """Ctrl-C during a measured comparison.

    Attributes:
        comparison: The runs that ended before, beside all predictions.
        finished: Those runs; all of them are on record.
    """

    def __init__(self, comparison: Comparison, finished: Sequence[Finished]) -> None:
        super().__init__()
        self.comparison = comparison
        self.finished = tuple(finished)


@dataclass(slots=True)
class ComparisonRun:
    """A comparison that is being measured.

    Attributes:
        plan: Workloads and repeats.
        predictions: For each workload its prediction, or the error in place of it.
        machine: This machine.
        request: How to run.
        store: Where records are kept.
        finished: The runs that ended so far.
    """

    plan: Plan
    predictions: Sequence[Prediction | TrainatomyError]
    machine: Machine
    request: CompareRequest
    store: Store
    finished: list[Finished] = field(default_factory=list)

    def run(self, observer: RunObserver, processes: Processes) -> Comparison:
        """Make every run of the plan that is not on record, and return the comparison.

        Raises:
            ComparisonInterrupted: On Ctrl-C. A comparison of the same workloads and group continues from there.
        """
        predicted = [None if isinstance(each, TrainatomyError) else each for each in self.predictions]

        def measure(workload: Workload) -> Measurement:
            runs = gpu.Runs(time_limit=self.request.time_limit)
            return gpu.measure(workload, runs, observer.progress, processes=processes)

        observer.planned(self.plan)
        self._note_unknown_gpu(observer)
        try:
            for each in run(
                self.plan, predicted, self.store, self.machine, measure,
                command=self.request.command, starting=observer.starting,
            ):  # fmt: skip
                self.finished.append(each)
                observer.finished(each)
        except KeyboardInterrupt as interrupt:
            raise ComparisonInterrupted(self.comparison(), self.finished) from interrupt
        for each in self.finished:
            if each.unsaved:
                observer.note(f"a run was not recorded: {each.unsaved}")
        return self.comparison()

    def _note_unknown_gpu(self, observer: RunObserver) -> None:
        if self.machine.gpus and self.machine.resolve_gpu() is None and not self.request.keep_gpus:
            here = ", ".join(sorted(set(self.machine.gpus)))
            used = ", ".join(sorted({workload.resolve_gpu().id for workload in self.plan.workloads}))
            observer.note(f"{here} is not a known GPU; predictions are for {used}")

    def comparison(self) -> Comparison:
        """Return the runs so far beside the predictions and, for a built-in comparison, the published figures."""
        published = published_beside(self.plan.workloads)
        return gather(
            self.plan.workloads,
            self.predictions,
            self.finished,
            published,
            samples=self.request.samples,
            group=self.plan.group,
            repeats=self.plan.repeats,
        )


def prepare(
    workloads: Sequence[Workload],
    predict: Callable[[Sequence[Workload], Task | None], Sequence[Prediction | TrainatomyError]],
    request: CompareRequest,
    processes: Processes,
) -> ComparisonRun:
    """Check, plan and predict, while the measuring processes import the libraries: what comes before the first run.

    Workloads that cannot be predicted are measured all the same, unless their description is wrong.

    Args:
        workloads: The training runs.
        predict: Returns a prediction or an error for each workload; gets a task of the measuring processes too, if any
            will run.
        request: How to run.
        processes: Where to run.

    Raises:
        DeviceError: There is no GPU.
        WorkloadError: A workload cannot be measured.
        TrainatomyError: Records cannot be written.
    """
    machine = machines.this_machine()
    request.check()
    refuse_era(workloads)
    machines.check_gpus(workloads)
    here = machine.resolve_gpu()
    if here is not None and not request.keep_gpus:
        workloads = [workload.replace("gpu", here.id) for workload in workloads]
    workloads = [measurable(workload) for workload in workloads]
    now = datetime.now(UTC) if request.fresh else None
    group = request.group or group_name(request.title, workloads, fresh=now)
    store = store_of(request.store)
    store.check()
    plan = Plan(tuple(workloads), group, request.repeat)
    missing = {row for row, repeat in plan.runs() if on_record(plan, row, repeat, store, machine) is None}
    tasks = [gpu.task_of(Job(workloads[row].to_mapping())) for row in sorted(missing)]
    processes.expect(*tasks)
    predictions = predict(workloads, tasks[0] if tasks else None)
    for each in predictions:
        if isinstance(each, WorkloadError):
            raise each
    return ComparisonRun(plan, predictions, machine, request, store)


def gather(
    workloads: Sequence[Workload],
    predictions: Sequence[Prediction | TrainatomyError],
    finished: Sequence[Finished] = (),
    published: Published | None = None,
    *,
    samples: int | None = None,
    group: str = "",
    repeats: int = 1,
) -> Comparison:
    """Return a comparison with one row for each workload.

    Args:
        workloads: The training runs.
        predictions: For each workload its prediction, or the error in place of it.
        finished: The runs that ended.
        published: Published figures, one for each workload or none.
        samples: Number of samples that times are given for; None takes that of the published figures.
        group: See ``Comparison``.
        repeats: See ``Comparison``.
    """
    figures = published.rows if published is not None else ()
    rows = tuple(
        _row(index, workload, prediction, finished, figures[index] if figures else None)
        for index, (workload, prediction) in enumerate(zip(workloads, predictions, strict=True))
    )
    source, remark = (published.source, published.remark) if published is not None else ("", "")
    samples = samples or (published.samples if published is not None else None)
    return Comparison(rows, source, remark, samples, group, repeats)


def _row(
    index: int,
    workload: Workload,
    prediction: Prediction | TrainatomyError,
    finished: Sequence[Finished],
    published: PublishedFigures | None,
) -> ComparisonRow:
    runs = [each for each in finished if each.row == index]
    predicted = None if isinstance(prediction, Exception) else prediction
    return ComparisonRow(
        name=workload.display_name,
        workload=workload.to_mapping(),
        prediction=predicted,
        prediction_error="" if predicted else str(prediction),
        measurements=tuple(each.measurement for each in runs if each.measurement is not None),
        errors=tuple(str(each.error) for each in runs if each.error is not None),
        published=published,
    )
