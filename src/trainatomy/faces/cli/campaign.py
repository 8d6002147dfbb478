"""A measured comparison on the command line: checks first, one bar over the runs, and what to do after Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.faces.cli.asked import published, samples_of, several_workloads
from trainatomy.faces.cli.output import note, progress
from trainatomy.faces.text.comparison import run_line
from trainatomy.workload.sweep import sweep

if TYPE_CHECKING:
    from trainatomy.campaign.machine import Machine
    from trainatomy.campaign.plan import Plan
    from trainatomy.campaign.run import Finished
    from trainatomy.records.store import Store
    from trainatomy.results.bill import Measurement, Prediction
    from trainatomy.results.comparison import Comparison
    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Asked:
    """What was typed: see the options of ``compare``."""

    files: Sequence[str]
    overrides: Mapping[str, Any]
    sweeps: Sequence[str] = ()
    repeats: int = 1
    records: str | None = None
    group: str | None = None
    fresh: bool = False
    time_limit: float | None = None
    trust_remote_code: bool = False


@dataclass(slots=True)
class Outcome:
    """What came of it: the ``comparison`` of what was run, the folder of records and what went wrong on the way."""

    comparison: Comparison
    folder: str
    finished: list[Finished] = field(default_factory=list)
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """That of the first run that failed; 1 where a record could not be kept; else 0."""
        for each in self.finished:
            if each.error is not None:
                return each.error.exit_code
        return 1 if any(each.unsaved for each in self.finished) else 0


def measured(asked: Asked) -> Outcome:
    """Predict every row, then run every row; what is on record already is not run again.

    Raises ``DeviceError`` where there is no GPU, ``WorkloadError`` for what cannot be measured, ``TrainatomyError``
    where records cannot be kept: all of it before the first run.
    """
    from trainatomy.campaign import machine as machines
    from trainatomy.campaign.gather import gather
    from trainatomy.campaign.plan import Plan, group_name
    from trainatomy.records.store import Store

    here = machines.this_machine()
    workloads = _workloads(asked, here)
    group = asked.group or group_name(_title(asked), workloads, fresh=datetime.now(UTC) if asked.fresh else None)
    plan, store = Plan(workloads, group, asked.repeats), Store(asked.records)
    store.check()
    predictions = _predict(workloads, asked.trust_remote_code)
    outcome = Outcome(gather(workloads, predictions, group=group), store.path)
    outcome.interrupted = not _run(plan, predictions, store, here, asked, outcome.finished)
    known = published(asked.files, workloads)
    outcome.comparison = gather(
        workloads,
        predictions,
        outcome.finished,
        known.rows,
        source=known.source,
        remark=known.remark,
        samples=samples_of(asked.files),
        group=group,
        repeats=asked.repeats,
    )
    return outcome


def advice(outcome: Outcome, asked: Asked) -> str:
    """After Ctrl-C: what is kept, and how to go on."""
    done, wanted = len(outcome.finished), len(outcome.comparison.rows) * asked.repeats
    named = f" with --group {outcome.comparison.group} in place of --fresh" if asked.fresh else ""
    return (
        f"stopped after {done} of {wanted} runs; what was measured is kept in {outcome.folder}. "
        f"The same command{named} goes on from there."
    )


def _workloads(asked: Asked, here: Machine) -> tuple[Workload, ...]:
    """With today's software and, unless another is named, for the card of this machine."""
    overrides = dict(asked.overrides)
    if overrides.get("gpu") is None and (card := here.card()) is not None:
        overrides["gpu"] = card.id
    workloads = sweep(several_workloads(asked.files, overrides, today=True), asked.sweeps)
    if any(workload.era is not None for workload in workloads):
        raise WorkloadError("--measure runs the software that is installed; era 2022 can be predicted, not measured")
    if here.gpus and here.card() is None and overrides.get("gpu") is None:
        card_ids = ", ".join(sorted({workload.card().id for workload in workloads}))
        note(f"no card is known for {', '.join(sorted(set(here.gpus)))}; predictions are for {card_ids} (--gpu)")
    return workloads


def _title(asked: Asked) -> str:
    return "-".join(dict.fromkeys(PurePath(file).stem for file in asked.files))


def _predict(workloads: Sequence[Workload], trust_remote_code: bool) -> list[Prediction | TrainatomyError]:
    """Each prediction, or why there is none: what cannot be predicted can still be measured."""
    from trainatomy.api import predict

    made: list[Prediction | TrainatomyError] = []
    with progress(f"executing {len(workloads)} trainings on tensors without data"):
        for workload in workloads:
            try:
                made.append(predict(workload, trust_remote_code=trust_remote_code))
            except WorkloadError:
                raise
            except TrainatomyError as error:
                made.append(error)
    return made


def _run(
    plan: Plan,
    predictions: Sequence[Prediction | TrainatomyError],
    store: Store,
    here: Machine,
    asked: Asked,
    finished: list[Finished],
) -> bool:
    """Run the plan and append to ``finished`` what ends; ``False`` where it was interrupted."""
    from trainatomy.campaign.run import run
    from trainatomy.gpu import measure as gpu

    made = [None if isinstance(each, TrainatomyError) else each for each in predictions]
    command = shlex.join(["trainatomy", *sys.argv[1:]])
    with _bar(plan) as bar:

        def one(workload: Workload) -> Measurement:
            return gpu.measure(workload, time_limit=asked.time_limit, progress=bar.going_on)

        try:
            for each in run(plan, made, store, here, one, command=command, starting=bar.starting):
                finished.append(each)
                bar.ended(each)
        except KeyboardInterrupt:
            return False
    return True


class _Bar:
    """One bar over all runs on stderr where somebody looks, and a line for each run that ended."""

    def __init__(self, plan: Plan, say: Callable[[str], None], update: Callable[..., None]) -> None:
        self._plan, self._say, self._update = plan, say, update
        self._running = ""

    def starting(self, row: int, repeat: int) -> None:
        self._running = self._name(row, repeat)
        self._update(description=self._running)

    def going_on(self, where: object) -> None:
        """``where``: what the worker says of the run, as text."""
        self._update(description=f"{self._running}: {where}")

    def ended(self, each: Finished) -> None:
        self._say(run_line(self._name(each.row, each.repeat), each.measurement, each.error, each.from_record))
        if each.unsaved:
            self._say(f"  not recorded: {each.unsaved}")
        self._update(advance=1)

    def _name(self, row: int, repeat: int) -> str:
        name = self._plan.workloads[row].name or f"training {row + 1}"
        return f"{name} ({repeat + 1} of {self._plan.repeats})" if self._plan.repeats > 1 else name


@contextmanager
def _bar(plan: Plan) -> Iterator[_Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    paper = Console(stderr=True, highlight=False)
    if not paper.is_terminal:
        yield _Bar(plan, lambda line: print(line, file=sys.stderr, flush=True), lambda **changes: None)
        return
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=paper, transient=True) as shown:
        task = shown.add_task("", total=len(plan))
        yield _Bar(plan, lambda line: paper.print(line, markup=False), lambda **changes: shown.update(task, **changes))
