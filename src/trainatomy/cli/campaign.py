"""A measured comparison on the command line: checks first, one bar over the runs, and what to do after Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trainatomy.cli.asked import samples_of, several_workloads
from trainatomy.cli.output import note, progress
from trainatomy.reporters.text.comparison import run_line
from trainatomy.units import many
from trainatomy.workload.sweep import sweep

if TYPE_CHECKING:
    from trainatomy.results.comparison import Comparison
    from trainatomy.runs.comparison import Campaign
    from trainatomy.runs.execute import Finished
    from trainatomy.runs.plan import Plan


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
    calibration: Path | None = None
    trust_remote_code: bool = False
    jobs: int | None = None


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
    campaign = _prepared(asked)
    for said in campaign.notes():
        note(said)
    interrupted = False
    with _bar(campaign.plan) as bar:
        try:
            for each in campaign.run(bar.starting, bar.going_on):
                bar.ended(each)
        except KeyboardInterrupt:
            interrupted = True
    return Outcome(campaign.comparison(), campaign.wanted.store.path, campaign.finished, interrupted)


def _prepared(asked: Asked) -> Campaign:
    """Everything that comes before the first run: with today's software and, unless another is named, for the card of
    this machine."""
    from trainatomy import api
    from trainatomy.catalog.calibrations import given
    from trainatomy.records.store import Store
    from trainatomy.runs.comparison import Wanted, prepare
    from trainatomy.runs.predicting import jobs_for

    workloads = sweep(several_workloads(asked.files, asked.overrides, today=True), asked.sweeps)
    priced = given(asked.calibration)
    wanted = Wanted(
        repeats=asked.repeats,
        store=Store(asked.records),
        title="-".join(dict.fromkeys(PurePath(file).stem for file in asked.files)),
        group=asked.group,
        fresh=asked.fresh,
        own_cards=asked.overrides.get("gpu") is not None or any(each.startswith("gpu=") for each in asked.sweeps),
        time_limit=asked.time_limit,
        samples=samples_of(asked.files),
        command=shlex.join(["trainatomy", *sys.argv[1:]]),
    )

    predict = partial(api.predict, trust_remote_code=asked.trust_remote_code, calibration=priced)
    with progress(f"executing {len(workloads)} trainings on tensors without data"):
        return prepare(workloads, predict, wanted, jobs_for(len(workloads), asked.jobs))


def advice(outcome: Outcome, asked: Asked) -> str:
    """After Ctrl-C: what is kept, and how to go on."""
    done, wanted = len(outcome.finished), len(outcome.comparison.rows) * asked.repeats
    named = f" with --group {outcome.comparison.group} in place of --fresh" if asked.fresh else ""
    return (
        f"stopped after {done} of {many(wanted, 'run')}; what was measured is kept in {outcome.folder}. "
        f"The same command{named} goes on from there."
    )


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
