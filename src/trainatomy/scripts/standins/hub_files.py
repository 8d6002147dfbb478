"""Files of a hub that frameworks read by themselves: configurations, and weights by ``torch.distributed.checkpoint``.

``transformers`` has stand-ins of its own (``pretrained.py``).  NeMo Automodel asks the hub for a ``config.json``, from
whose path it takes the commit, and loads weights into a model that it has built, as torchtitan does; ms-swift asks for
the folder of a model, by default from ModelScope, and has transformers read what is in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainatomy.catalog.architectures import architecture
from trainatomy.scripts.standins.notes import StandIns
from trainatomy.scripts.standins.pretrained import UNREAD

_CONFIGURATION = "config.json"
_COMMIT = "0" * 40
_WEIGHTS = (".safetensors", ".metadata")
"""Ends of the names of files that a checkpoint has."""


def install(stand_ins: StandIns) -> None:
    """Put them in place, each when its library is imported."""
    shipped = partial(_shipped, stand_ins, {})
    stand_ins.when("huggingface_hub.file_download", partial(_put_download, stand_ins, shipped))
    stand_ins.when("huggingface_hub._snapshot_download", partial(_put_snapshot, stand_ins, shipped))
    stand_ins.when("modelscope.hub.snapshot_download", partial(_put_snapshot, stand_ins, shipped))
    stand_ins.when("torch.distributed.checkpoint", partial(_put_load, stand_ins))


def _shipped(stand_ins: StandIns, made: dict[str, Path], name: str) -> Path | None:
    """Return a folder like that of a download with the configuration that ships with trainatomy; None without one."""
    known = architecture(name)
    if known is None:
        return None
    stand_ins.note("configuration", name)
    if name not in made:
        folder = Path(tempfile.mkdtemp(), f"models--{name.replace('/', '--')}", "snapshots", _COMMIT)
        folder.mkdir(parents=True)
        text = json.dumps({**known.config, "architectures": [known.class_name]})
        (folder / _CONFIGURATION).write_text(text, encoding="utf-8")
        made[name] = folder
    return made[name]


def _put_download(stand_ins: StandIns, shipped: Callable[[str], Path | None], module: Any) -> None:
    """Let a configuration that ships with trainatomy take the place of one that cannot be downloaded."""
    original = module.hf_hub_download

    def download(repo_id: str, filename: str, *rest: Any, user_agent: Any = None, **more: Any) -> Any:
        try:
            return original(repo_id, filename, *rest, user_agent=user_agent, **more)
        except UNREAD:
            # transformers, which says who it is, has stand-ins of its own
            folder = shipped(repo_id) if filename == _CONFIGURATION and user_agent is None else None
            if folder is None:
                raise
        return str(folder / filename)

    _put_both(stand_ins, module, "hf_hub_download", download)


def _put_snapshot(stand_ins: StandIns, shipped: Callable[[str], Path | None], module: Any) -> None:
    """Let a folder with the configuration alone take the place of a model that cannot be downloaded."""
    original = module.snapshot_download

    def download(*given: Any, **more: Any) -> Any:
        if not stand_ins.network:
            more["local_files_only"] = True  # without it, ModelScope tries for half a minute
        try:
            return original(*given, **more)
        except Exception:  # ModelScope's, which have no class in common with the hub's
            folder = shipped(str(given[0] if given else more.get("repo_id") or more.get("model_id")))
            if folder is None:
                raise
        return str(folder)

    _put_both(stand_ins, module, "snapshot_download", download)


def _put_both(stand_ins: StandIns, module: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function in its module and in the package, which keeps those that were asked for."""
    package = sys.modules[module.__name__.partition(".")[0]]
    stand_ins.put(module, name, function)
    if name in vars(package):
        stand_ins.put(package, name, function)


def _put_load(stand_ins: StandIns, module: Any) -> None:
    """Leave weights as they are where their checkpoint is not on this machine."""
    original = module.load

    def load(state_dict: Any, *rest: Any, checkpoint_id: Any = None, storage_reader: Any = None, **more: Any) -> Any:
        place = checkpoint_id if checkpoint_id is not None else getattr(storage_reader, "path", None)
        if place is not None and not _has_weights(os.fspath(place)):
            stand_ins.note("pretrained weights", str(place))
            return None
        return original(state_dict, *rest, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **more)

    for owner in (module, module.state_dict_loader):
        stand_ins.put(owner, "load", load)


def _has_weights(folder: str) -> bool:
    """Return whether there may be weights: in files of that folder, or in a place that is none."""
    if "://" in folder:
        return True
    return Path(folder).is_dir() and any(each.name.endswith(_WEIGHTS) for each in Path(folder).iterdir())
