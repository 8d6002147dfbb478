"""What a configuration of another framework says, as the keys of a workload.

``Dialect`` is the table of one framework.  ``Translation`` reads one configuration by it: a dialect's own function
takes the keys that decide together, and the table the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from trainatomy.catalog.architectures import architecture
from trainatomy.catalog.files import parse_yaml
from trainatomy.workload.arguments import arguments, is_off
from trainatomy.workload.document import suggestion
from trainatomy.workload.model import UNSIMULATED_ATTENTION
from trainatomy.workload.overlay import set_key
from trainatomy.workload.section import Path
from trainatomy.workload.train import OWN_KEYS, TrainSpec

DIALECTS = ("llamafactory", "trl", "axolotl", "swift", "automodel")
"""The tables, each a file of this folder."""
_TEMPLATE = re.compile(r"\$[A-Za-z_{(]")
"""A variable or a command of the shell, or of a template, whose value is not here."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The keys of a framework's configuration.

    Attributes:
        id: Name of the table.
        name: Name of the framework.
        release: Release whose sources were read.
        marks: Keys that only its configurations have.
        commands: Words that start its command line, by what they set: ``trl sft`` sets the loop.  Text instead is why
            the command is not simulated.
        keys: Keys of a workload, by the keys that say the same.
        together: Keys that the dialect's own function reads.
        renamed: Other spellings of keys.
        ignored: Keys that change neither memory nor time, with the reason.
        refused: Keys that are not simulated unless they are empty or false, with the reason.
        values: Values of refused keys that change nothing.
        sections: Sections of a workload whose keys it has by their names: ``train``, those of ``TrainingArguments``.
        says: How a key of a workload is said: a key of the framework, or its keys and values by the workload's value.
        implied: Keys of a workload that follow from others, and are not said.
        flat: Whether keys are nested in its files; the table has their dotted paths, or those of whole sections.
        options: How an option of its command looks: ``--key value`` or ``key=value``.
        always: Keys of a workload that its command sets.
        several_gpus: Keys of a workload that its command sets on several GPUs.
        takes_all_gpus: Whether its command starts a process on each GPU that it may use.
        presets: Configurations of DeepSpeed and FSDP that it ships, by the names that stand for them.
    """

    id: str
    name: str
    release: str
    marks: frozenset[str]
    commands: Mapping[str, Mapping[str, Any] | str]
    keys: Mapping[str, Path]
    together: frozenset[str]
    renamed: Mapping[str, str]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]
    values: Mapping[str, tuple[Any, ...]]
    sections: frozenset[str]
    says: Mapping[str, str | Mapping[Any, Mapping[str, Any]]]
    implied: frozenset[str]
    options: str
    always: Mapping[str, Any]
    several_gpus: Mapping[str, Any]
    takes_all_gpus: bool
    flat: bool
    presets: Mapping[str, Mapping[str, Any]]

    def known(self) -> set[str]:
        """Return all keys that the framework has."""
        own = {*self.keys, *self.together, *self.renamed, *self.ignored, *self.refused, *self.marks}
        if self.flat:
            own |= {key.partition(".")[0] for key in own}
        return own | (_argument_names() if "train" in self.sections else set())


@cache
def dialect(name: str) -> Dialect:
    """Read a table once."""
    raw = parse_yaml(files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    refused = raw.get("refused", {})
    return Dialect(
        id=name,
        name=raw["name"],
        release=raw["release"],
        marks=frozenset(raw["marks"]),
        commands=raw.get("commands", {}),
        keys={key: tuple(path.split(".")) for key, path in raw["keys"].items()},
        together=frozenset(raw.get("together", ())),
        renamed=raw.get("renamed", {}),
        ignored={key: reason for reason, keys in raw.get("ignored", {}).items() for key in keys},
        refused={key: rule if isinstance(rule, str) else rule["reason"] for key, rule in refused.items()},
        values={key: tuple(rule["values"]) for key, rule in refused.items() if isinstance(rule, Mapping)},
        sections=frozenset(raw.get("sections", ())),
        says={path: key for key, path in raw["keys"].items()} | raw["says"],
        implied=frozenset(raw["implied"]),
        options=raw["options"],
        always=raw.get("always", {}),
        several_gpus=raw.get("several_gpus", {}),
        takes_all_gpus=raw.get("takes_all_gpus", True),
        flat=raw.get("flat", False),
        presets=raw.get("presets", {}),
    )


def flattened(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested keys by their dotted paths; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        found |= flattened(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return found


@cache
def _argument_names() -> set[str]:
    return {*TrainSpec.model_fields.keys() - OWN_KEYS, *arguments().names(), *arguments().synonyms}


def visible_gpus(variables: Mapping[str, str]) -> int:
    """Return how many GPUs a command may use, as far as a variable says."""
    return variables.get("CUDA_VISIBLE_DEVICES", "").strip(",").count(",") + 1


def find_file(name: str, folder: FilePath) -> FilePath | None:
    """Return a file by its name: from the current folder, that of the configuration, or one above it.

    The configurations that frameworks ship name files from the root of their repository.
    """
    places = (FilePath.cwd(), folder, *folder.resolve().parents)
    return next((place / name for place in places if (place / name).is_file()), None)


def configuration_of(model: Any) -> Mapping[str, Any]:
    """Return the ``config.json`` of a model that ships with trainatomy or lies in a folder; empty for others."""
    file = FilePath(str(model)) / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        content = None
    known = None if content is not None else architecture(str(model))
    content = known.config if known is not None else content
    return content if isinstance(content, Mapping) else {}


def may_see(model: Any) -> bool:
    """Return whether a model takes images, as far as its configuration is here."""
    config = configuration_of(model)
    return not config or "vision_config" in config


def names_in(value: Any) -> list[str]:
    """Return the names in a list, or in a text that separates them by commas."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return [str(part).strip() for part in parts]


@dataclass(frozen=True, slots=True)
class Origin:
    """The configuration that a workload was read from.

    Attributes:
        dialect: Name of the dialect's table.
        source: The file, or the command line.
        is_command: Whether it is a command line.
        text: Its text.
        keys: The key that set each key of the workload.
        assumed: What the framework does where the configuration says nothing.
        several_gpus: Keys of the workload that the framework's command sets on several GPUs.
        counts: Numbers of GPUs and machines that were given beside it, by the keys of a workload.
    """

    dialect: str
    source: str
    is_command: bool
    text: str = field(repr=False)
    keys: Mapping[Path, str] = field(repr=False)
    assumed: tuple[str, ...] = ()
    several_gpus: Mapping[str, Any] = field(default_factory=dict, repr=False)
    counts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def completed(self, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a workload with what the framework's command sets on several GPUs, where nothing else is said."""
        parallel = mapping.get("parallel")
        if not isinstance(parallel, Mapping) or parallel.get("gpus", 1) == parallel.get("nodes", 1) == 1:
            return mapping
        return {**self.several_gpus, **mapping}

    @property
    def name(self) -> str:
        """Return the name of the framework."""
        return dialect(self.dialect).name


class Translation:
    """A configuration that is read as a workload.

    Args:
        table: The keys of its framework.
        given: The configuration, by its keys.
        folder: Folder of its file, or the current one; None where no files are read.
        variables: Variables of the shell that are set for its command.

    Attributes:
        variables: Variables of the shell that are set for its command.
        counts: Numbers of GPUs and machines that are given beside it, by the keys of a workload.
        mapping: The keys of a workload.
        keys: The key of the configuration that set each key of the workload.
        assumed: What the framework does where the configuration says nothing.
        problems: What is refused: the key and the reason.
        is_mistaken: Whether one of them would be refused by the framework, too.
    """

    def __init__(
        self,
        table: Dialect,
        given: Mapping[str, Any],
        folder: FilePath | None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.table = table
        self.variables = variables
        self.counts: Mapping[str, Any] = {}
        self._folder = folder
        self.mapping: dict[str, Any] = {}
        self.keys: dict[Path, str] = {}
        self.assumed: list[str] = []
        self.problems: list[tuple[str, str]] = []
        self.is_mistaken = False
        self._given = {table.renamed.get(key, key): value for key, value in given.items()}
        self._spelt = {table.renamed.get(key, key): key for key in given}
        self._taken: set[str] = set()
        self._is_abandoned = False

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that the table reads; ``default`` where it is not given."""
        value = self._given.get(key)
        return default if value is None else value

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which the table then leaves alone; ``default`` where it is not given."""
        self._taken.add(key)
        return self.value(key, default)

    def word(self, key: str, default: Any = None) -> Any:
        """Return the single value of a key, refusing lists and mappings; ``default`` where it is not given."""
        value = self.take(key, default)
        if isinstance(value, list | Mapping):
            self.reject(key, f"must be one value, found {value!r}")
            return default
        return value

    def count(self, key: str, default: int) -> int:
        """Return the whole number above 0 that a key has, refusing other values; ``default`` where it is not given."""
        value = self.take(key, default)
        text = str(value).strip()
        if isinstance(value, bool) or not text.isdigit() or int(text) < 1:
            self.reject(key, f"must be a whole number above 0, found {value!r}")
            return default
        return int(text)

    def file(self, key: str) -> FilePath | None:
        """Return the file that a key names (see ``find_file``), refusing a name without a file."""
        name = self.take(key)
        if name is None:
            return None
        if not isinstance(name, str):
            self.reject(key, f"must name a file, found {name!r}")
            return None
        if self._folder is None:
            self.reject(key, f"names a file, which is not read here: {name}")
            return None
        found = find_file(name, self._folder)
        if found is None:
            self.reject(key, f"no such file: {name}, from {FilePath.cwd()} or a folder of the configuration")
        return found

    def configuration(self, key: str) -> Mapping[str, Any] | None:
        """Return a configuration that a key has: as it is written, by the name of one that ships, or by its file."""
        value = self.take(key)
        if is_off(value):
            return None
        if isinstance(value, Mapping):
            return value
        if str(value) in self.table.presets:
            return self.table.presets[str(value)]
        text, source = str(value), "the value"
        try:
            if not text.lstrip().startswith("{"):
                file = self.file(key)
                if file is None:
                    return None
                source = str(file)
                text = file.read_text(encoding="utf-8")
            content = json.loads(text)
        except (OSError, ValueError) as error:
            self.reject(key, f"{source} is no JSON: {error}")
            return None
        if not isinstance(content, Mapping):
            self.reject(key, f"{source} is no mapping of keys to values")
            return None
        return content

    def section(self, name: str) -> dict[str, Any]:
        """Return the values of all keys under a dotted path, which the table then leaves alone."""
        keys = [key for key in self._given if key.startswith(f"{name}.")]
        return {key.removeprefix(f"{name}."): self.take(key) for key in keys}

    def gives(self, key: str) -> bool:
        """Return whether the configuration has a key with a value."""
        return self._given.get(key) is not None

    def set(self, path: str, value: Any, *keys: str) -> None:
        """Set a key of the workload, as the first of ``keys`` that is given says."""
        parts: Path = tuple(path.split("."))
        if path == "model.attn_implementation" and value in UNSIMULATED_ATTENTION:
            key = next((key for key in keys if self.gives(key)), path)
            self.refuse(key, f"{value}: not simulated: it calls kernels of the flash-attn package; sdpa is")
        set_key(self.mapping, parts, value)
        said = next((key for key in keys if self.gives(key)), None)
        if said is not None:
            self.keys[parts] = self._spelt.get(said, said)

    def assume(self, what: str) -> None:
        """Note what the framework does where the configuration says nothing."""
        if what not in self.assumed:
            self.assumed.append(what)

    def assume_length(self, tokens: Any, key: str) -> None:
        """Note how long samples are taken to be."""
        text = f"{tokens:,}" if isinstance(tokens, int) else tokens
        given = "" if self.gives(key) else ", its default"
        self.assume(f"every sample has {text} tokens ({key}{given}); give --lengths-file for those of your data")

    def refuse(self, key: str, reason: str) -> None:
        """Note why a key cannot be simulated."""
        self._taken.add(key)
        self.problems.append((self._spelt.get(key, key), reason))

    def reject(self, key: str, reason: str) -> None:
        """Note why a key is wrong."""
        self.is_mistaken = True
        self.refuse(key, reason)

    def abandon(self, key: str, reason: str) -> None:
        """Refuse the whole configuration for one key: the others are not looked at."""
        self.problems = [(self._spelt.get(key, key), reason)]
        self._taken = {*self._given}
        self._is_abandoned = True

    def finish(self) -> None:
        """Read the keys that the dialect's own function has left to the table."""
        if self._is_abandoned:
            return
        for key, value in self._given.items():
            if isinstance(value, str) and _TEMPLATE.search(value) and self._row(key) not in self.table.ignored:
                self.reject(key, f"is a template ({value}): give the value that it stands for")
            elif key not in self._taken:
                self._read(key, value)

    def _is_section(self, key: str) -> bool:
        """Return whether the table has keys below one."""
        return self.table.flat and any(other.startswith(f"{key}.") for other in self.table.known())

    def _row(self, key: str) -> str:
        """Return the key of the table that a key belongs to: itself, or of nested keys the nearest section."""
        rows = self.table.keys.keys() | self.table.ignored.keys() | self.table.refused.keys() | self.table.together
        names = key.split(".") if self.table.flat else []
        paths = (".".join(names[:length]) for length in range(len(names), 0, -1))
        return next((path for path in paths if path in rows), key)

    def _read(self, key: str, value: Any) -> None:
        table = self.table
        given, key = key, self._row(key)
        if self._is_section(given) and value not in (None, {}):
            self.reject(given, f"must be a mapping of keys to values, found {value!r}")
            return
        if key in table.refused:
            if not is_off(value) and value not in table.values.get(key, ()):
                self.refuse(given, f"not simulated: {table.refused[key]}")
        elif key in table.keys:
            if value is not None:
                self.set(".".join(map(str, table.keys[key])), value, key)
        elif key in table.ignored:
            return
        elif "train" in table.sections and key in _argument_names():
            if value is not None:
                self.set(f"train.{key}", value, key)
        elif key not in table.marks | table.together:
            hint = suggestion(key, table.known())
            self.reject(
                key, f"is no key of {table.name} {table.release}{hint}; keys that are not known may change memory"
            )
