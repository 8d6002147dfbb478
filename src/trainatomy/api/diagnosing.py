"""Look at this machine: what is wrong with GPUs, links, software and host."""

from __future__ import annotations

from collections.abc import Callable

from trainatomy.api.verb import verb
from trainatomy.doctor.deaths import last_words
from trainatomy.doctor.gathering import diagnose as diagnose_machine
from trainatomy.doctor.gathering import gather
from trainatomy.requests.measuring import DiagnoseRequest
from trainatomy.results.machine import Diagnosis


@verb(DiagnoseRequest)
def diagnose(*, request: DiagnoseRequest, stage: Callable[[str], None] = lambda stage: None) -> Diagnosis:
    """Look at this machine: links, power and heat, memory errors, software, other processes, host.

    It never changes a setting. Without a GPU it looks at software and host.

    Args:
        request: How to look at it.
        stage: Called with the name of each stage when it begins.

    Raises:
        DeviceError: There is no GPU of a given number, or none to watch.
        TrainatomyError: There is no process ``pid``.
    """
    facts = gather(
        request.gpus,
        bandwidth=request.bandwidth,
        seconds=request.seconds,
        pid=request.pid,
        died=last_words(request.died),
        stage=stage,
    )
    return diagnose_machine(facts)
