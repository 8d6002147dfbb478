"""Frameworks whose one process asks for several GPUs: Lightning (``devices=4``), Ultralytics (``device="0,1"``).

They start a process for each GPU, as torchrun does.  The machine of a dry run has the GPUs that its command names, one
if it names none, so that a script asks for more than there are before it starts any process.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainatomy.scripts.standins.notes import StandIns


def install(stand_ins: StandIns) -> None:
    """Put them in place, each when its framework is imported."""
    for package in ("lightning.fabric", "lightning_fabric"):
        stand_ins.when(f"{package}.utilities.device_parser", partial(_put_lightning, stand_ins))
    stand_ins.when("ultralytics.utils.torch_utils", partial(_put_ultralytics, stand_ins))


def _put_lightning(stand_ins: StandIns, parser: Any) -> None:
    original = parser._sanitize_gpu_ids

    def check(gpus: list[int], *rest: Any, **options: Any) -> list[int]:
        _ask(stand_ins, gpus)
        found: list[int] = original(gpus, *rest, **options)
        return found

    stand_ins.put(parser, "_sanitize_gpu_ids", check)


def _put_ultralytics(stand_ins: StandIns, utilities: Any) -> None:
    original = utilities.select_device

    def select(device: Any = "", *rest: Any, **options: Any) -> Any:
        words = [*map(str, device)] if isinstance(device, list | tuple) else str(device).split(",")
        numbers = [word.strip(" []()'\"").removeprefix("cuda:") for word in words]
        if all(number.isdigit() for number in numbers):
            _ask(stand_ins, [*map(int, numbers)])
        return original(device, *rest, **options)

    stand_ins.put(utilities, "select_device", select)


def _ask(stand_ins: StandIns, gpus: list[int]) -> None:
    """Run the script as one of several ranks where it asks for GPUs that are not there."""
    if len(gpus) > 1 and len(gpus) > stand_ins.process.current.count:
        stand_ins.repeat(len(gpus), 1)
