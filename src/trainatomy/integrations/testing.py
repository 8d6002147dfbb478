"""A pytest plugin: the fixture ``fits_on``, which checks without a GPU that a training fits on one.

def test_training_fits(fits_on):
fits_on("rtx-4090", "train.py --batch-size 16")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import trainatomy
from trainatomy.reporters import text
from trainatomy.results.prediction import Prediction

FitsOn = Callable[..., "Prediction"]


@pytest.fixture
def fits_on() -> FitsOn:
    """Return a function of a GPU and a script that fails the test if the script does not fit on it.

    Its keywords are those of ``trainatomy.run_script``; it returns the prediction.
    """

    def check(gpu: str, command: str | Sequence[str], **options: Any) -> Prediction:
        __tracebackhide__ = True
        prediction = trainatomy.run_script(command, gpu=gpu, **options)
        if not prediction.fits:
            pytest.fail(text.render(text.verdict_line(prediction), width=1000).strip(), pytrace=False)
        return prediction

    return check
