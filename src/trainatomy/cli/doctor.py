"""``trainatomy doctor``: what is wrong with this machine."""

from __future__ import annotations

from typing import Annotated

from trainatomy.cli.options import Debug, Json, in_run
from trainatomy.cli.output import progress, quiet_libraries, show, show_json
from trainatomy.errors import UnhealthyMachine

Gpu = Annotated[
    list[int] | None,
    in_run("--gpu", "Check this GPU only, numbered as in nvidia-smi; repeatable.", min=0, metavar="N"),
]
Bandwidth = Annotated[
    bool,
    in_run(
        "--bandwidth/--no-bandwidth",
        "Measure copies, and clocks under load: a second for each GPU that is not in use (default: on).",
    ),
]
WatchPid = Annotated[
    int | None, in_run("--watch-pid", "Watch this running training instead of measuring.", metavar="PID", min=1)
]
Seconds = Annotated[
    float | None,
    in_run("--seconds", "How long to watch (default: 5 with --watch-pid, otherwise not at all).", metavar="N", min=0.1),
]


def doctor(
    gpu: Gpu = None,
    bandwidth: Bandwidth = True,
    watch_pid: WatchPid = None,
    seconds: Seconds = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine: what is wrong, what it costs (if that was ever measured), and how to fix it.

    It checks links between GPUs and to the host, power and heat, memory errors, driver and libraries, environment
    variables, other processes, and limits of the host. It never changes a setting. Without a GPU it
    checks software and host.

    The exit code is 0 if nothing or only notes were found, and 9 with errors or warnings.
    """
    with progress("checking this machine") as stage, quiet_libraries(debug=debug):
        from trainatomy.api.diagnosing import diagnose
        from trainatomy.reporters.doctor_json import diagnosis_to_json
        from trainatomy.reporters.doctor_sentences import verdict
        from trainatomy.reporters.text.doctor import doctor_page

        found = diagnose(gpus=gpu or (), bandwidth=bandwidth, seconds=seconds or 0.0, pid=watch_pid, stage=stage)
    if json:
        show_json(diagnosis_to_json(found))
    else:
        show(doctor_page(found))
    if not found.healthy:
        raise UnhealthyMachine(f"{verdict(found)} on this machine")
