"""The configuration of a transformers model: from a folder, from what ships, or from the hub; then the overrides.

Weights are never fetched.  What ships is asked before the hub, so that the answer does not depend on a network:
configurations of published weights do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.architectures import architecture, nearest
from trainatomy.errors import WorkloadError
from trainatomy.training.hub import fetch_config
from trainatomy.workload.nearest import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from trainatomy.workload.model import ModelSpec

Raw = dict[str, Any]
"""The content of a ``config.json``."""


def build_configuration(spec: ModelSpec, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration that ``spec`` describes, with its overrides.

    Raises ``WorkloadError`` (unknown name, key or value) or ``NetworkError`` (neither shipped nor reachable).
    """
    raw, config_class = _source(spec, trust_remote_code)
    overrides = _checked(spec.config, raw, config_class)
    merged = _merge(raw, overrides)
    try:
        config = config_class(**merged)
    except Exception as error:  # transformers checks values itself, by exceptions of many kinds
        raise WorkloadError(f"model.config: {config_class.__name__} refuses these values: {error}") from error
    config._name_or_path = spec.id or ""
    return config


def _source(spec: ModelSpec, trust_remote_code: bool) -> tuple[Raw, type[PreTrainedConfig]]:
    """The raw configuration (without overrides) and its class."""
    if spec.id is None:
        from trainatomy.training.classes import transformers_class

        assert spec.class_ is not None  # the schema wants one of id, class, factory
        model_class = transformers_class(spec.class_)
        config_class = getattr(model_class, "config_class", None)
        if config_class is None:
            raise WorkloadError(f"model.class: {spec.class_} stands for many models: give model.id too")
        return {}, config_class
    raw = _raw(spec.id)
    if "auto_map" in raw and raw.get("model_type") not in _known_types():
        return raw, _remote_config_class(spec.id, raw, trust_remote_code)
    return raw, _config_class(spec.id, raw)


def _raw(name: str) -> Raw:
    """``config.json`` of a local folder, of a shipped architecture or of the hub, in this order."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read_folder(folder)
    shipped = _shipped(name)
    if shipped is not None:
        return shipped
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise WorkloadError(f"model.id: there is no folder {folder}")
    shipped_names = nearest(name)
    hint = f"; shipped under a similar name: {', '.join(shipped_names)}" if shipped_names else ""
    return fetch_config(name, hint=hint)


def _read_folder(folder: Path) -> Raw:
    from transformers import PreTrainedConfig

    if not (folder / "config.json").is_file():
        raise WorkloadError(f"model.id: the folder {folder} has no config.json")
    raw, _ = PreTrainedConfig.get_config_dict(str(folder), local_files_only=True)
    return dict(raw)


def _shipped(name: str) -> Raw | None:
    """The configuration that ships under ``name``, or ``None``."""
    found = architecture(name)
    if found is None:
        return None
    return {"architectures": [found.class_name], **found.config}


def _known_types() -> Mapping[str, Any]:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING


def _config_class(name: str, raw: Raw) -> type[PreTrainedConfig]:
    model_type = raw.get("model_type")
    if model_type is None:
        raise WorkloadError(f"model.id: the configuration of {name} names no model_type")
    known = _known_types()
    if model_type not in known:
        from transformers import __version__

        raise WorkloadError(
            f"model.id: {name} is of type {model_type!r}, which transformers {__version__} does not know"
            f"{suggestion(model_type, known)}"
        )
    return known[model_type]


def _remote_config_class(name: str, raw: Raw, trust_remote_code: bool) -> type[PreTrainedConfig]:
    if not trust_remote_code:
        raise WorkloadError(
            f"model.id: {name} brings its own code, which would run on this machine: read it at "
            f"https://huggingface.co/{name}, then allow it with --trust-remote-code"
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(raw["auto_map"]["AutoConfig"], name)


def _checked(overrides: Mapping[str, Any], raw: Raw, config_class: type[PreTrainedConfig]) -> Raw:
    """The overrides under the names that the class itself uses; unknown names are refused.

    A configuration takes any keyword and keeps it, so a misspelt override would change nothing without a word.
    """
    aliases = dict(config_class.attribute_map)
    known = {*config_class().to_dict(), *raw, *aliases, "num_labels", "rope_theta", "rope_scaling"}
    canonical: Raw = {}
    for key, value in overrides.items():
        if key not in known:
            shown = sorted(name for name in known if not name.startswith("_"))
            raise WorkloadError(f"model.config.{key}: {config_class.__name__} has no such key{suggestion(key, shown)}")
        canonical[aliases.get(key, key)] = value
    return canonical


def _merge(raw: Raw, overrides: Raw) -> Raw:
    """Overrides over the raw configuration: sub-configurations key by key, lists by layer cut to the new depth."""
    merged = {**raw, **overrides}
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(raw.get(key), Mapping):
            merged[key] = {**raw[key], **value}
    if "num_labels" in overrides:
        for key in ("id2label", "label2id"):
            if key not in overrides:
                merged.pop(key, None)
    for key in ("num_hidden_layers", "num_layers", "n_layer"):
        if key in overrides and (type(overrides[key]) is not int or overrides[key] < 0):
            raise WorkloadError(f"model.config.{key}: must be a number of layers, found {overrides[key]!r}")
        if key in raw and key in overrides:
            merged.update(_fit_layer_lists(raw, overrides, int(raw[key]), int(overrides[key])))
    return merged


def _fit_layer_lists(raw: Raw, overrides: Raw, old_depth: int, depth: int) -> Raw:
    """Lists with one entry a layer (``layer_types``, …), repeated or cut to ``depth`` entries."""
    return {
        key: [value[index % old_depth] for index in range(depth)]
        for key, value in raw.items()
        if key.startswith(("layer", "mlp_layer")) and isinstance(value, list) and len(value) == old_depth > 0
        if key not in overrides
    }
