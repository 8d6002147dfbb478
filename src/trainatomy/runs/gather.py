"""What was predicted, measured and published of several trainings, as one comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.results.comparison import Comparison, ComparisonRow, PublishedFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.errors import TrainatomyError
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.execute import Finished
    from trainatomy.workload.schema import Workload


def gather(
    workloads: Sequence[Workload],
    predictions: Sequence[Prediction | TrainatomyError],
    finished: Sequence[Finished] = (),
    published: Sequence[PublishedFigures] = (),
    *,
    source: str = "",
    remark: str = "",
    samples: int | None = None,
    group: str = "",
    repeats: int = 1,
) -> Comparison:
    """One row for each workload.

    ``predictions``: for each workload its prediction, or why there is none; ``finished``: what has been run so far;
    ``published``: for each workload, or for none.  The rest: see ``Comparison``.
    """
    rows = tuple(
        _row(index, workload, prediction, finished, published[index] if published else None)
        for index, (workload, prediction) in enumerate(zip(workloads, predictions, strict=True))
    )
    return Comparison(rows, source, remark, samples, group, repeats)


def _row(
    index: int,
    workload: Workload,
    prediction: Prediction | TrainatomyError,
    finished: Sequence[Finished],
    published: PublishedFigures | None,
) -> ComparisonRow:
    mine = [each for each in finished if each.row == index]
    made = None if isinstance(prediction, Exception) else prediction
    model = workload.model
    return ComparisonRow(
        name=workload.name or str(model.id or model.class_ or model.factory),
        workload=workload.to_mapping(),
        prediction=made,
        prediction_error="" if made else str(prediction),
        measurements=tuple(each.measurement for each in mine if each.measurement is not None),
        errors=tuple(str(each.error) for each in mine if each.error is not None),
        published=published,
    )
