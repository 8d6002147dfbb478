"""Looking at this machine: what is wrong with GPUs, links, software and host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainatomy.results.diagnosis import Diagnosis


def diagnose(
    *,
    gpus: Sequence[int] = (),
    bandwidth: bool = True,
    seconds: float = 0.0,
    pid: int | None = None,
    stage: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """Look at this machine: links, power and heat, memory errors, software, other processes, host.

    It never changes a setting. Without a GPU it looks at software and host.

    Args:
        gpus: Numbers of the GPUs to look at, as in nvidia-smi; all if empty.
        bandwidth: Measure copies, and clocks under load (about a second for each GPU); not on GPUs that are in use.
        seconds: Watch a running training for so long; with ``pid`` 5 s if it is left out.
        pid: Process of that training.
        stage: Called with the name of each stage when it begins.

    Raises:
        DeviceError: There is no GPU of a given number, or none to watch.
        TrainatomyError: There is no process ``pid``.
    """
    from trainatomy.doctor.diagnosing import diagnose as diagnose_machine
    from trainatomy.doctor.gathering import gather

    return diagnose_machine(gather(gpus, bandwidth=bandwidth, seconds=seconds, pid=pid, stage=stage))
