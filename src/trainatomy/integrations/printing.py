"""Print GPU memory and training results: the two helpers of the guides, with a breakdown of their numbers."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from trainatomy.errors import TrainatomyError
from trainatomy.integrations.utilization import utilization
from trainatomy.integrations.watch import Watch, has_gpu
from trainatomy.reporters.text.host import host_page
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import console
from trainatomy.reporters.text.script import speed_text, summary_page, utilization_text
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction


def print_gpu_utilization() -> None:
    """Print how much of the GPU's memory is used, by which processes and for what; without a GPU, warn once."""
    if has_gpu():
        console().print(utilization_text(utilization()))


def print_summary(result: Any) -> None:
    """Print a summary of ``result``.

    Args:
        result: A ``TrainOutput`` of ``Trainer.train`` (prints time, samples per second and the GPU's memory), a
            ``Measurement``, a ``Prediction``, or a ``Watch``.

    Raises:
        TrainatomyError: ``result`` is something else.
    """
    if isinstance(result, Watch):
        measurement = result.result()
        if measurement is not None:
            _show(summary_page(measurement, result.prediction))
        elif result.host_bill is not None:
            _show(host_page(result.host_bill))
    elif isinstance(result, Measurement):
        _show(measurement_page(result, None))
    elif isinstance(result, Prediction):
        _show(prediction_page(result))
    elif isinstance(metrics := getattr(result, "metrics", None), dict):
        _show(speed_text(metrics))
        print_gpu_utilization()
    else:
        raise TrainatomyError(
            f"print_summary cannot read a {type(result).__name__}: pass the output of Trainer.train(), "
            "a Measurement, a Prediction, or the Watch of trainatomy.watch(...)."
        )


def _show(drawing: RenderableType) -> None:
    console().print(drawing)
