"""Predictions that are kept in a folder of any filesystem, so that an interrupted comparison continues from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from trainatomy.errors import TrainatomyError
from trainatomy.libraries import installed_versions
from trainatomy.records.folder import Folder

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.options import PredictOptions
    from trainatomy.workload.schema import Workload

SCHEMA = "trainatomy/kept-prediction/1"
_DIGITS = 24


@dataclass(frozen=True)
class Kept:
    """A function that predicts, and keeps what it predicted; it can be sent to other processes and machines.

    A prediction is found again by its workload, the options, and the versions of all libraries, trainatomy's too.
    Predictions with code of the user's are not kept, because that code may change.

    Attributes:
        predict: Predicts one workload.
        options: How it predicts.
        place: Folder, as a path or a URL that fsspec knows; all workers must reach it.
    """

    predict: Callable[[Workload], Prediction]
    options: PredictOptions
    place: str

    def __call__(self, workload: Workload) -> Prediction:
        """Return the prediction that is kept, or predict and keep it."""
        if _runs_user_code(workload, self.options):
            return self.predict(workload)
        folder, name = Folder(self.place, {}), self.name_of(workload)
        known = _read(folder, name)
        if known is not None:
            return known
        prediction = self.predict(workload)
        folder.write(name, json.dumps({"schema": SCHEMA, **asdict(prediction)}, default=str).encode())
        return prediction

    def name_of(self, workload: Workload) -> str:
        """Return the name of the file of a prediction."""
        described = [workload.to_mapping(), repr(self.options), installed_versions()]
        text = json.dumps(described, sort_keys=True, default=str)
        return f"prediction-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}.json"


def _runs_user_code(workload: Workload, options: PredictOptions) -> bool:
    own = (workload.model.factory, workload.data.factory, "." in workload.train.optim, workload.model.class_)
    path = str(own[3] or "")
    return options.trust_remote_code or any(own[:3]) or "." in path or ":" in path


def _read(folder: Folder, name: str) -> Prediction | None:
    """Return a prediction that is kept; None if there is none, or its file is damaged."""
    from pydantic import ValidationError

    try:
        content = folder.read(name)
        if content is None:
            return None
        value: dict[str, Any] = json.loads(content)
        if value.pop("schema", None) != SCHEMA:
            return None
        return _adapter().validate_python(value)
    except (TrainatomyError, ValueError, AttributeError, ValidationError):
        return None


@cache
def _adapter() -> TypeAdapter[Prediction]:
    from pydantic import TypeAdapter

    from trainatomy.results.prediction import Prediction

    return TypeAdapter(Prediction)
