"""Workloads that are not validated yet, and command-line flags laid over them.

A file, flags and keywords are overlaid as plain mappings and validated once, when everything is known.

Command-line flags for every key of a workload, derived from the schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from trainatomy.workload.arguments import CHECKED, NEW_NAMES, arguments
from trainatomy.workload.document import suggestion
from trainatomy.workload.explain import explain, workload_error
from trainatomy.workload.factory import REFERENCES, resolve
from trainatomy.workload.launch import read_launch
from trainatomy.workload.overlay import get_key, overlay, remove_replaced, set_key
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import Path, Problem, leaves, members

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from trainatomy.workload.dialects.translation import Origin


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
_RESHARD: Path = ("parallel", "reshard_after_forward")
"""Its flag is a switch; its other values need a file."""
_FACTORIES = {(section, name) for section in ("model", "data") for name in ("factory", "factory_arguments")}
_PREFIXED = {*_FACTORIES, ("model", "class"), ("generation", "use_cache")}
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
    "preference": "Preferences",
    "sentence_transformers": "sentence-transformers",
    "generation": "Generation",
    "train": "TrainingArguments",
    "gpu": "GPU and software",
}
_OF_SOFTWARE = frozenset({"gpu", "instance", "allocator", "software", "era"})
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
    if path == _RESHARD:
        return "switch"
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
        choices=() if path == _RESHARD else _choices(field),
        aliases=_ALIASES.get(path, ()),
        default=_default(field.default),
    )


FLAGS: tuple[Flag, ...] = tuple(_flag(path, field) for path, field in leaves(Workload) if path not in _FILE_ONLY)
"""The flags, in the order of the schema; keys that are awkward on a command line are left out."""

BY_NAME: dict[str, Flag] = {name: flag for flag in FLAGS for name in (flag.name, *flag.aliases)}
"""Flags by name and alias."""


_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_NO_MODEL = (
    "no model: give --model, or --model-class with --config, or --model-factory, or a workload file (for a comparison "
    "also `notebook`)"
)


def _plain(path: Path, message: str) -> str:
    return str(Problem(path, message))


def _count(value: Any) -> int | None:
    """Return a number of GPUs or machines as it is typed; None for what is none."""
    return int(str(value)) if str(value).isdigit() and int(str(value)) else None


@dataclass(frozen=True, slots=True)
class RawWorkload:
    """A workload before validation.

    Attributes:
        mapping: Nested mappings with the keys of a workload file.
        places: Where each key was written, for messages: ``file.yaml:9: train.fp16`` or ``--fp16``.
        flags: The flag that set a key.
        problems: Messages about flags that could not be read.
        describe: Returns the message for a problem with a key that no flag set.
        origin: The configuration of another framework that it was read from.
        again: Reads that configuration for other numbers of GPUs and machines, by the keys of a workload; None where
            nothing else follows from them.
    """

    mapping: Mapping[str, Any]
    places: Mapping[Path, str] = field(default_factory=dict)
    flags: Mapping[Path, Flag] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    describe: Callable[[Path, str], str] = field(default=_plain, repr=False)
    origin: Origin | None = None
    again: Callable[[Mapping[str, Any]], RawWorkload] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, workload: Workload | None) -> RawWorkload:
        """Return an existing workload as a raw one, or an empty one for None."""
        if workload is None:
            return cls({}, describe=lambda path, message: _NO_MODEL if path == ("model",) else _plain(path, message))
        return cls(workload.to_raw_mapping(), workload.places, origin=workload.origin)

    def with_flags(self, flags: Mapping[str, Any]) -> RawWorkload:
        """Return a copy with flags laid over it.

        Args:
            flags: Values by name (hyphens or underscores, with or without ``--``), as Python values or as typed in a
                shell; None, () and [] mean that the flag was not set. Names of ``TrainingArguments`` that change
                nothing are accepted.  ``launch`` is what a launcher says (see ``read_launch``); the other flags
                override it, and it overrides the workload.
        """
        present = {
            _plain_name(name): value for name, value in flags.items() if value is not None and value not in ((), [])
        }
        counts = {f"parallel.{name}": _count(present[name]) for name in ("gpus", "nodes") if name in present}
        if self.again is not None and None not in counts.values() and counts:
            return replace(self.again(counts), again=None).with_flags(flags)
        launch = present.pop("launch", None)
        mapping = overlay({}, self.mapping)
        problems, used = list(self.problems), dict(self.flags)
        places = dict(self.places)
        if launch is not None and self.again is not None:
            problems.append(
                "--launch: does not go with a recipe, whose accumulation follows from the GPUs: give --gpus"
            )
        elif launch is not None:
            launched = read_launch(launch).settings(present.get("loop") or mapping.get("loop") or "trainer")
            for path, value in launched.items():
                set_key(mapping, path, value)
                places[path] = f"--launch: {'.'.join(map(str, path))}"
            remove_replaced(mapping, [*launched])
        for name, value in present.items():
            flag = BY_NAME.get(name)
            try:
                path = ("train", _ignored_argument(name, value)) if flag is None else flag.path
                read = _ignored_value(name, value) if flag is None else _parse(flag, value)
            except ValueError as error:
                problems.append(f"--{name.replace('_', '-')}: {error}")
                continue
            if flag is not None:
                used[path] = flag
            if not _is_malformed(mapping, path):
                set_key(mapping, path, overlay(get_key(mapping, path), read))
        remove_replaced(mapping, [path for path in used if path not in self.flags])
        places = {**places, **{path: flag.option for path, flag in used.items()}}
        return replace(self, mapping=mapping, places=places, flags=used, problems=tuple(problems))

    def check(self) -> Workload | list[str]:
        """Validate, and return the workload or every message about what is wrong."""
        messages = list(self.problems)
        mapping = self.mapping if self.origin is None else self.origin.completed(self.mapping)
        try:
            workload = Workload.model_validate(mapping)
        except ValidationError as error:
            return messages + [self._message(*problem) for problem in explain(error, mapping, Workload)]
        return messages or workload.placed(self.places, self.origin)

    def validate(self) -> Workload:
        """Validate, and return the workload.

        Raises:
            WorkloadError: One line for each problem, with the flag or the line of the file that caused it.
        """
        return validate_all([self])[0]

    def _message(self, path: Path, message: str) -> str:
        """Return a message that names the flag that set the key, or the place in the file."""
        for length in range(len(path), 0, -1):
            if flag := self.flags.get(path[:length]):
                inner = ".".join(map(str, path[length:]))
                return f"{flag.option}: {inner}: {message}" if inner else f"{flag.option}: {message}"
        return self.describe(path, message)


def validate_all(raw: Iterable[RawWorkload]) -> tuple[Workload, ...]:
    """Validate several raw workloads.

    Raises:
        WorkloadError: Lists every problem of all of them, each once.
    """
    checked = [each.check() for each in raw]
    if messages := [message for each in checked if isinstance(each, list) for message in each]:
        raise workload_error(dict.fromkeys(messages))
    return tuple(each for each in checked if isinstance(each, Workload))


def merge(base: Workload | None, flags: Mapping[str, Any]) -> Workload:
    """Return ``base`` with flags over it, or the workload that flags alone describe (see ``RawWorkload.with_flags``).

    Raises:
        WorkloadError: Names the flags that are wrong.
    """
    return RawWorkload.of(base).with_flags(flags).validate()


def _plain_name(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _is_malformed(mapping: Mapping[str, Any], path: Path) -> bool:
    """Return whether the file has something else where ``path`` needs a section; validation will say so."""
    section = mapping.get(str(path[0]))
    return len(path) > 1 and path[0] != "gpu" and section is not None and not isinstance(section, Mapping)


def _ignored_value(name: str, value: Any) -> Any:
    """Return the value if it decides whether a note is due, or is checked; others (a token may be one) are dropped."""
    return value if name in arguments().not_simulated or name in CHECKED else None


def _ignored_argument(name: str, value: Any) -> str:
    """Return the name of a ``TrainingArguments`` setting that changes nothing here; raise ValueError for others."""
    known = arguments()
    if known.is_unapplied(name, value):
        return name
    if reason := known.refusal_of(name):
        raise ValueError(f"not supported: {reason}")
    if name in known.renamed:
        raise ValueError(f"is called {known.renamed[name]} today")
    if name in known.synonyms:
        raise ValueError(f"unknown flag; did you mean {known.synonyms[name]}?")
    raise ValueError(f"unknown flag{suggestion(name, BY_NAME)}")


def _parse(flag: Flag, value: Any) -> Any:
    """Return the value of a flag as typed in a shell; values that are not strings are returned as they are."""
    if flag.kind == "switch" and isinstance(value, str):
        return _BOOLEANS.get(value.lower(), value)
    if flag.kind == "pairs":
        return value if isinstance(value, Mapping) else _parse_pairs([value] if isinstance(value, str) else value)
    if flag.kind == "list":
        return _parse_names(value)
    if flag.path[-1] in REFERENCES and isinstance(value, str):
        return resolve(value, FilePath.cwd())
    return value


def _parse_names(value: Any) -> Any:
    """Split ``q_proj,v_proj`` into names; a regular expression and ``all-linear`` stay one string."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        return [part for each in value for part in str(each).split(",")] if isinstance(value, Iterable) else value
    if value == "all-linear" or re.search(r"[\\^$*+?()\[\]{}|]", value):
        return value
    return [part for part in value.split(",") if part]


def _parse_pairs(texts: Iterable[str]) -> dict[str, Any]:
    """Parse ``["num_labels=3", "vision_config.hidden_size=64"]`` into nested mappings; values are YAML.

    A text in braces is a mapping, as in ``--gradient_checkpointing_kwargs '{"use_reentrant": false}'``, and so is the
    content of a JSON file, as in ``--fsdp_config fsdp.json``.

    Raises:
        ValueError: A string is neither.
    """
    pairs: dict[str, Any] = {}
    for text in texts:
        if (mapping := _mapping(str(text))) is not None:
            pairs |= mapping
            continue
        key, equals, raw = str(text).partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"must look like KEY=VALUE, found {text!r}")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            raise ValueError(f"the value of {key} cannot be read: {raw!r}") from None
        set_key(pairs, tuple(key.split(".")), value)
    return pairs


def _mapping(text: str) -> dict[str, Any] | None:
    """Return a mapping that is written in braces or in a JSON file; None for other texts."""
    if text.endswith(".json") and "=" not in text:
        try:
            text = FilePath(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot read {text}: {error.strerror}") from None
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"is not a mapping: {text!r}") from None
    return found if isinstance(found, dict) else None
