"""Description of this machine, as far as measurements depend on it: its GPUs, its driver and its libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.visible import require_gpus
from trainatomy.measurement.measure import require_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainatomy.results.measurement import Measurement
    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs and the driver of this machine.

    Attributes:
        gpus: Product names that the driver reports; empty where it cannot be asked without a GPU process.
        driver: Version of the driver.
    """

    gpus: tuple[str, ...]
    driver: str

    def resolve_gpu(self) -> GPU | None:
        """Return the catalogue's entry for the GPUs here, or None if it has none or they differ."""
        if len(set(self.gpus)) != 1:
            return None
        try:
            return find_gpu(self.gpus[0])
        except WorkloadError:
            return None

    def made(self, measurement: Measurement) -> bool:
        """Return whether ``measurement`` was made on such a GPU, with this driver and the libraries installed here."""
        if self.gpus and measurement.gpu not in self.gpus:
            return False
        if self.driver and measurement.driver != self.driver:
            return False
        return all(version_of(name) == version for name, version in measurement.versions.items() if name != "cuda")


def check_gpus(workloads: Iterable[Workload]) -> None:
    """Check that this machine has the GPUs of every training.

    Raises:
        DeviceError: It has fewer.
        WorkloadError: A training runs on several machines.
    """
    for workload in workloads:
        if workload.parallel.world_size > 1:
            require_gpus(workload.parallel)


def this_machine() -> Machine:
    """Return this machine as its driver describes it; raise ``DeviceError`` if there is no GPU."""
    require_gpu()
    try:
        with nvml.session() as driver:
            return Machine(tuple(each.name for each in driver.gpus), driver.version)
    except (MissingLibrary, nvml.NoAnswer):
        return Machine((), "")
