"""The software of an era: what it sets in a workload that does not set it itself, and what it did not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import parse_yaml
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.overlay import get_key, overlay, set_key
from trainatomy.workload.section import Problem

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload
    from trainatomy.workload.section import Path

_LATER_ATTENTION = {"flash_attention_2": "FlashAttention 2", "flex_attention": "FlexAttention"}


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


def era_problems(workload: Workload) -> list[Problem]:
    """Refuse to emulate libraries that had not what a workload asks for."""
    if workload.era is None:
        return []
    attention = workload.model.attn_implementation
    came_later = {
        "TRL's trainers": LOOPS[workload.loop].settings is not None,
        "torch.compile": workload.train.compiles,
        "Liger's kernels": workload.train.use_liger_kernel,
        "FSDP2": workload.parallel.strategy == "fsdp2",
        **{name: attention == key for key, name in _LATER_ATTENTION.items()},
    }
    asked = [name for name, is_asked in came_later.items() if is_asked]
    return [Problem(("era",), f"emulates libraries without {name}: leave it out") for name in asked]


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
