"""Settings of ``train`` whose defaults depend on the rest of a workload: on its loop, and on peft.

The software of an era: what it sets in a workload that does not set it itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.architectures import architecture
from trainatomy.catalog.files import parse_yaml
from trainatomy.workload.loops import LOOPS, loop_of
from trainatomy.workload.overlay import get_key, overlay, set_key

if TYPE_CHECKING:
    from trainatomy.workload.model import ModelSpec
    from trainatomy.workload.schema import Workload
    from trainatomy.workload.section import Path


CHECKPOINTING = "gradient_checkpointing"
STORED_QUANTISED = ("quantization_config", "compression_config")
"""Keys of a configuration that say how the weights of a checkpoint are quantised."""


def with_loop_defaults(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping of a workload with the defaults of its loop's configuration in the section ``train``.

    A precision that the mapping names replaces that of the defaults, as in TRL's ``__post_init__``.
    """
    loop = LOOPS.get(str(raw.get("loop")))
    train = raw.get("train") or {}
    if loop is None or raw.get("mode", "training") != "training" or not isinstance(train, Mapping):
        return raw
    defaults = dict(loop.defaults)
    if train.get("fp16"):
        defaults["bf16"] = False
    missing = {name: value for name, value in defaults.items() if train.get(name) is None}
    return {**raw, "train": {**train, **missing}}


def peft_prepares(workload: Workload) -> bool:
    """Return whether peft prepares quantised weights for adapters; TRL's trainers do not let it (trl 1.16)."""
    spec = workload.model.quantization
    by_trl = loop_of(workload).settings is not None
    return workload.model.lora is not None and not by_trl and (spec is None or spec.prepare_model_for_kbit_training)


def default_checkpointing(workload: Workload) -> bool | None:
    """Return the default of ``train.gradient_checkpointing``; None where it depends on a checkpoint that is not known.

    peft's ``prepare_model_for_kbit_training`` switches checkpointing on unless a script tells it not to.
    """
    if workload.mode != "training" or not peft_prepares(workload):
        return False
    if workload.model.quantization is not None:
        return workload.model.is_quantised
    return None if _may_be_stored_quantised(workload.model) else False


def _may_be_stored_quantised(spec: ModelSpec) -> bool:
    shipped = None if spec.id is None else architecture(spec.id)
    known = {**spec.config, **({} if shipped is None else shipped.config)}
    return (spec.id is not None and shipped is None) or any(key in known for key in STORED_QUANTISED)


def says_checkpointing(workload: Workload) -> bool:
    """Return whether the workload itself says if activations are recomputed."""
    return CHECKPOINTING in workload.train.model_fields_set


def loop_checkpoints(workload: Workload) -> bool:
    """Return whether the loop switches checkpointing on.

    Where nobody says it, peft does so alone: on one GPU with PyTorch's reentrant checkpoints, because it passes an
    empty ``gradient_checkpointing_kwargs`` (peft 0.21) in place of none, for which transformers chooses others.
    """
    return workload.train.gradient_checkpointing and says_checkpointing(workload)


def with_era(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping of a workload over the settings of its era; what it sets itself stays."""
    if str(raw.get("era")) != "2022":
        return raw
    found: dict[str, Any] = overlay(_settings(), raw)
    if not isinstance(raw.get("model"), Mapping) or raw["model"].get("factory"):
        found["model"] = raw.get("model")  # a factory decides on attention
    if raw.get("mode", "training") != "training":
        found.pop("zero_grad_set_to_none")
        found["train"] = raw.get("train", {})
    return found


def state_era(workload: Workload, mapping: dict[str, Any]) -> None:
    """State in the mapping of a workload all settings that its era has, as their defaults are others."""
    if workload.era is None:
        return
    whole = workload.model_dump(mode="json", by_alias=True)
    given = with_era({"era": workload.era, "mode": workload.mode, "model": {"factory": workload.model.factory}})
    for path in _leaves({name: value for name, value in given.items() if name not in ("era", "mode")}):
        if path != ("model", "factory"):
            set_key(mapping, path, get_key(whole, path))


@cache
def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = parse_yaml(files(__package__).joinpath("era-2022.yaml").read_text(encoding="utf-8"))
    return settings


def _leaves(mapping: Mapping[str, Any], prefix: Path = ()) -> Iterator[Path]:
    """Yield the paths of settings; ``gradient_checkpointing_kwargs`` is one."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and len(prefix) < 1:
            yield from _leaves(value, (*prefix, name))
        else:
            yield (*prefix, name)
