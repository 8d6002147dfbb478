"""``torch.save`` and the savers of libraries: nothing is written, or a file of the right size without data."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from trainatomy.errors import SimulationError
from trainatomy.scripts.places import current_place
from trainatomy.scripts.standins.notes import StandIns


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    safetensors: Any = sys.modules.get("safetensors.torch")
    holders = [] if safetensors is None else _holders(safetensors.save_file)
    if "transformers.trainer" in sys.modules:
        from trainatomy.simulator.saving import files_without_data

        stand_ins.stack.enter_context(files_without_data())
        _redirect(stand_ins, torch.save)
    else:
        _redirect(stand_ins, None)

    def save_file(tensors: Any, filename: Any, *_: Any, **__: Any) -> None:
        Path(stand_ins.files.redirected(filename)).touch()

    for module, name in holders:
        stand_ins.put(module, name, save_file)
    original = torch.load

    def load(file: Any, map_location: Any = None, **options: Any) -> Any:
        if isinstance(file, str | os.PathLike) and (written := stand_ins.files.found(file)) is not None:
            raise SimulationError(
                f"{current_place(stand_ins.script)} loads {os.fspath(file)}, which this run saved; a dry run writes no "
                f"checkpoints (it would be {written}).\nRun it without resuming"
            )
        return original(file, map_location="cpu", **options)

    stand_ins.put(torch, "load", load)


_LIBRARIES = ("safetensors", "accelerate", "transformers", "peft", "diffusers", "timm", "trl", "lightning")


def _holders(function: Any) -> list[tuple[Any, str]]:
    """Return the modules of libraries that imported a function, with the name that it has there."""
    modules = [one for name, one in [*sys.modules.items()] if name.partition(".")[0] in _LIBRARIES]
    return [(one, name) for one in modules for name, value in [*vars(one).items()] if value is function]


def _redirect(stand_ins: StandIns, original: Any) -> None:
    """Let ``torch.save`` write to the redirected file: by ``original``, or an empty one."""

    def save(value: Any, file: Any, *rest: Any, **more: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            return
        target = stand_ins.files.redirected(file)
        if original is None:
            Path(target).touch()
        else:
            original(value, target, *rest, **more)

    stand_ins.put(torch, "save", save)
