"""A search over a script's own flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainatomy.results.prediction import Prediction


@dataclass(frozen=True, slots=True)
class ScriptCandidate:
    """A script with some of its flags set.

    ``message`` says why there is no prediction, or what ended it early. ``exit_code`` is that of the script's error, 0
    without one.
    """

    flags: Mapping[str, str]
    command: tuple[str, ...]
    prediction: Prediction | None
    message: str = ""
    exit_code: int = 0

    @property
    def failed(self) -> bool:
        """True if an error ended it."""
        return self.prediction is None or self.exit_code != 0

    @property
    def fits(self) -> bool:
        """True if it ran without an error, and fits."""
        return not self.failed and self.prediction is not None and self.prediction.fits

    @property
    def samples_per_second(self) -> float:
        """Samples per second on the GPU; 0 where they are not known."""
        time = self.prediction.time if self.prediction is not None else None
        return time.samples_per_second if time is not None else 0.0


@dataclass(frozen=True, slots=True)
class ScriptFit:
    """Candidates in the order in which they were run; ``best`` is the fastest that fits."""

    name: str
    gpu: str
    candidates: tuple[ScriptCandidate, ...]

    @property
    def failed(self) -> tuple[ScriptCandidate, ...]:
        """The candidates that an error ended."""
        return tuple(each for each in self.candidates if each.failed)

    @property
    def best(self) -> ScriptCandidate | None:
        """The candidate that fits and trains most samples per second."""
        fitting = [each for each in self.candidates if each.fits]
        return max(fitting, key=lambda each: each.samples_per_second, default=None)
