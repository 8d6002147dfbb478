"""This machine, as far as a measurement depends on it: a record of another GPU or other software stands for no run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.measurement.device import nvml
from trainatomy.measurement.measure import require_gpu

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Machine:
    """``gpus``: product names that the driver shows; none where it cannot be asked without a GPU process."""

    gpus: tuple[str, ...]
    driver: str

    def resolve_gpu(self) -> GPU | None:
        """The card of the catalogue that all GPUs here are; ``None`` where it is not known, or they differ."""
        if len(set(self.gpus)) != 1:
            return None
        try:
            return find_gpu(self.gpus[0])
        except WorkloadError:
            return None

    def made(self, measurement: Measurement) -> bool:
        """Whether ``measurement`` is of such a GPU, such a driver and the versions that are installed here."""
        if self.gpus and measurement.gpu not in self.gpus:
            return False
        if self.driver and measurement.driver != self.driver:
            return False
        return all(version_of(name) == version for name, version in measurement.versions.items() if name != "cuda")


def this_machine() -> Machine:
    """What the driver says; raises ``DeviceError`` where there is no GPU."""
    require_gpu()
    try:
        with nvml.session() as driver:
            return Machine(tuple(each.name for each in driver.cards), driver.version)
    except (MissingLibrary, nvml.NoAnswer):
        return Machine((), "")
