"""Command-line flags for every key of a workload, derived from the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from trainatomy.workload.checkpointing import NEW_NAMES
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import leaves, members

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from trainatomy.workload.section import Path

Kind = Literal["switch", "integer", "number", "choice", "text", "list", "pairs"]

_NAMES: dict[Path, str] = {("model", "id"): "model", ("model", "lora", "lora_bias"): "lora_use_bias"}
_ALIASES: dict[Path, tuple[str, ...]] = {
    ("model", "class"): ("class",),
    **{("train", old): (new,) for new, old in NEW_NAMES.items()},
}
_DEEPSPEED: Path = ("train", "deepspeed")
"""Its flag takes a file, as that of ``TrainingArguments``."""
_QUANT_TYPE: Path = ("model", "quantization", "quant_type")
"""Its flag takes a name; what ``config.json`` says of it needs a file."""
_IMAGE_SIZE: Path = ("data", "image_size")
"""Its flag takes one text."""
_PREFIXED = {("model", "class"), ("model", "factory"), ("data", "factory"), ("generation", "use_cache")}
_FILE_ONLY = {
    ("gpu", "base"),
    *(("gpu", "rates_flop_per_second", key) for key in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")),
    *(("model", "lora", key) for key in ("trainable_token_indices", "layer_replication", "layers_to_transform")),
}
_PANELS = {
    "model": "Model",
    "lora": "LoRA",
    "quantization": "Quantization",
    "data": "Data",
    "parallel": "Parallel",
    "generation": "Generation",
    "train": "TrainingArguments",
    "gpu": "GPU and software",
}
_OF_SOFTWARE = frozenset({"gpu", "allocator", "software", "era"})
"""Keys of a workload about the machine; the others beside its sections are about the loop."""
_METAVARS: dict[str, str] = {"integer": "INT", "number": "FLOAT", "text": "TEXT", "list": "NAME", "pairs": "KEY=VALUE"}


@dataclass(frozen=True)
class Flag:
    """A flag. ``name`` has underscores (``per_device_train_batch_size``); ``path`` is the key that it sets.

    A ``switch`` is written ``--fp16``, ``--no-fp16`` or ``--fp16 false``; ``list`` and ``pairs`` may be repeated.
    ``default`` is empty where the key is off, empty or not set by default.
    """

    name: str
    path: Path
    kind: Kind
    help: str
    panel: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    default: str = ""

    @property
    def option(self) -> str:
        """Return the flag as an option: ``--per-device-train-batch-size``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def repeatable(self) -> bool:
        """Return whether several values are accepted."""
        return self.kind in ("list", "pairs")

    @property
    def metavar(self) -> str:
        """Return the placeholder for the value in help texts."""
        return "|".join(self.choices) if self.choices else _METAVARS.get(self.kind, "BOOL")


def _name(path: Path) -> str:
    """Return the name of the flag of a key; a name that would be ambiguous is prefixed with its section."""
    section, key = (path[-2] if len(path) > 1 else "", str(path[-1]))
    if path in _NAMES:
        return _NAMES[path]
    if path in _PREFIXED or section in ("gpu", "link", "lengths"):
        return f"{section}_{key}"
    return key if section != "lora" or key.startswith("lora_") else f"lora_{key}"


def _kind(path: Path, field: FieldInfo) -> Kind:
    types = members(field.annotation)
    if _choices(field):
        return "choice"
    if str(path[-1]).endswith("_bytes"):
        return "text"  # "80 GiB" is a size too
    if path in (_DEEPSPEED, _QUANT_TYPE, _IMAGE_SIZE):
        return "text"
    if dict in types and tuple not in types:
        return "pairs"
    if tuple in types:
        return "list"
    if bool in types and str not in types:
        return "switch"
    if float in types:
        return "number"
    return "integer" if int in types else "text"


def _choices(field: FieldInfo) -> tuple[str, ...]:
    def literals(annotation: Any) -> tuple[str, ...]:
        if get_origin(annotation) is Literal:
            return get_args(annotation)
        return tuple(value for inner in get_args(annotation) for value in literals(inner))

    return literals(field.annotation)


def _panel(path: Path) -> str:
    """Return the panel of the innermost section that has one."""
    beside = "GPU and software" if path[0] in _OF_SOFTWARE else "Training loop"
    return next((_PANELS[str(part)] for part in reversed(path[:-1]) if part in _PANELS), beside)


def _default(value: Any) -> str:
    return "" if value is PydanticUndefined or not value else str(value).lower() if value is True else str(value)


def _flag(path: Path, field: FieldInfo) -> Flag:
    return Flag(
        name=_name(path),
        path=path,
        kind=_kind(path, field),
        help=field.description or "",
        panel=_panel(path),
        choices=_choices(field),
        aliases=_ALIASES.get(path, ()),
        default=_default(field.default),
    )


FLAGS: tuple[Flag, ...] = tuple(_flag(path, field) for path, field in leaves(Workload) if path not in _FILE_ONLY)
"""The flags, in the order of the schema; keys that are awkward on a command line are left out."""

BY_NAME: dict[str, Flag] = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases)}
"""Flags by name and alias."""
