"""A whole campaign: trainings that were predicted, their runs on this machine's GPU, and the comparison of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.measurement import measure as gpu
from trainatomy.measurement.process.sessions import Sessions
from trainatomy.records.store import Store
from trainatomy.runs import machine as machines
from trainatomy.runs.execute import Finished, run
from trainatomy.runs.gather import gather
from trainatomy.runs.plan import Plan, group_name
from trainatomy.runs.predicting import predict_all
from trainatomy.runs.published import published_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainatomy.results.comparison import Comparison
    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.machine import Machine
    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a campaign is to be run.

    ``repeats``: of each training; ``store``: where records are kept; ``title``, ``group``, ``fresh``: see
    ``plan.group_name``; ``own_cards``: predict for the workloads' own cards, not for this machine's; ``time_limit``:
    seconds for a run; ``samples``: of how many samples time is given; ``command``: how it was asked for, for the
    records.
    """

    repeats: int = 1
    store: Store = field(default_factory=Store)
    title: str = "comparison"
    group: str | None = None
    fresh: bool = False
    own_cards: bool = False
    time_limit: float | None = None
    samples: int | None = None
    command: str = ""


@dataclass(slots=True)
class Campaign:
    """``predictions``: for each workload of ``plan`` its prediction, or why there is none; ``finished``: the runs that
    ended; the rest: see ``Wanted``."""

    plan: Plan
    predictions: list[Prediction | TrainatomyError]
    machine: Machine
    wanted: Wanted
    finished: list[Finished] = field(default_factory=list)

    def run(
        self,
        starting: Callable[[int, int], None] | None = None,
        going_on: Callable[[object], None] = lambda where: None,
    ) -> Iterator[Finished]:
        """Every run of the plan as it ends; what is on record already is not run again.

        Whoever stops it loses nothing that ended: a campaign of the same workloads and group goes on from there.
        ``starting`` is told row and repeat before a run, ``going_on`` where it is (``Progress``, which has a text).
        """

        made = [None if isinstance(each, TrainatomyError) else each for each in self.predictions]
        with Sessions(lasting=True) as sessions:

            def one(workload: Workload) -> Measurement:
                return gpu.measure(workload, time_limit=self.wanted.time_limit, progress=going_on, sessions=sessions)

            for each in run(
                self.plan, made, self.wanted.store, self.machine, one, command=self.wanted.command, starting=starting
            ):
                self.finished.append(each)
                yield each

    def notes(self) -> tuple[str, ...]:
        """What whoever asked should know besides: a card that is not known, records that could not be kept."""
        notes = [f"a run was not recorded: {each.unsaved}" for each in self.finished if each.unsaved]
        if self.machine.gpus and self.machine.resolve_gpu() is None and not self.wanted.own_cards:
            here = ", ".join(sorted(set(self.machine.gpus)))
            cards = ", ".join(sorted({workload.resolve_gpu().id for workload in self.plan.workloads}))
            notes.insert(0, f"no card is known for {here}; predictions are for {cards}")
        return tuple(notes)

    def comparison(self) -> Comparison:
        """What has been run so far beside what was predicted and, of a ready comparison, published."""
        workloads, known = self.plan.workloads, published_beside(self.plan.workloads)
        return gather(
            workloads,
            self.predictions,
            self.finished,
            known.rows,
            source=known.source,
            remark=known.remark,
            samples=self.wanted.samples or known.samples,
            group=self.plan.group,
            repeats=self.plan.repeats,
        )


def prepare(
    workloads: Sequence[Workload], predict: Callable[[Workload], Prediction], wanted: Wanted, jobs: int = 1
) -> Campaign:
    """Check, plan and predict, in ``jobs`` processes (see ``predict_all``): everything that comes before the first run.

    Raises ``DeviceError`` where there is no GPU, ``WorkloadError`` for what cannot be measured, ``TrainatomyError``
    where records cannot be kept.  What cannot be predicted for another reason can still be measured.
    """
    here = machines.this_machine()
    if wanted.repeats < 1:
        raise WorkloadError(f"repeat: {wanted.repeats} runs of each are none; give 1 or more")
    if any(workload.era is not None for workload in workloads):
        raise WorkloadError(
            "a measurement runs the software that is installed; era 2022 can be predicted, not measured"
        )
    gpu = here.resolve_gpu()
    if gpu is not None and not wanted.own_cards:
        workloads = [workload.model_copy(update={"gpu": gpu.id}) for workload in workloads]
    now = datetime.now(UTC) if wanted.fresh else None
    group = wanted.group or group_name(wanted.title, workloads, fresh=now)
    wanted.store.check()
    plan = Plan(tuple(workloads), group, wanted.repeats)
    made = predict_all(predict, workloads, jobs)
    for one in made:
        if isinstance(one, WorkloadError):
            raise one
    return Campaign(plan, made, here, wanted)
