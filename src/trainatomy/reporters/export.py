"""A candidate's settings, ready to paste: Python code, a workload file, options of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from trainatomy.reporters.export_python import WIDTH, training_arguments_code
from trainatomy.reporters.settings import defaults, inline, setting
from trainatomy.results.fit import Candidate
from trainatomy.workload.overlay import set_key
from trainatomy.workload.overrides import FLAGS, Flag, RawWorkload
from trainatomy.workload.schema import Workload

__all__ = ["command_line_flags", "launch_command", "training_arguments_code", "workload_yaml"]


def workload_yaml(candidate: Candidate) -> str:
    """Return the workload of a candidate as the text of a file, with batch size and accumulation even if default."""
    mapping = explicit(candidate, _ALWAYS)
    text = yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True)
    return text if yaml.safe_load(text) == mapping else yaml.safe_dump(mapping, sort_keys=False)


_ALWAYS = ("train.per_device_train_batch_size", "train.gradient_accumulation_steps")


def explicit(candidate: Candidate, keys: Iterable[str]) -> dict[str, Any]:
    """Return the workload of a candidate as a mapping that has ``keys`` even where they are the defaults."""
    workload = Workload.from_mapping(candidate.workload)
    mapping, whole = workload.to_mapping(), workload.model_dump(mode="json", by_alias=True)
    for key in keys:
        if (value := setting(whole, key)) is not None and setting(mapping, key) is None:
            set_key(mapping, tuple(key.split(".")), value)
    ordered = {name: mapping[name] for name in whole if name in mapping}
    return ordered | {"train": {name: ordered["train"][name] for name in whole["train"] if name in ordered["train"]}}


def launch_command(candidate: Candidate) -> str:
    """Return the command that starts a training on its GPUs; on several machines, each runs it."""
    plan = candidate.plan
    if plan.strategy == "dp":
        return "python train.py"
    if plan.nodes == 1:
        return f"torchrun --nproc-per-node {plan.gpus} train.py"
    return (
        f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.gpus} \\\n"
        "    --rdzv-backend c10d --rdzv-endpoint HOST:29500 train.py"
    )


def command_line_flags(candidate: Candidate) -> str:
    r"""Return the workload of a candidate as options of trainatomy's commands, broken into lines by ``\``.

    A last line, a comment of the shell, names the keys that no option can set.
    """
    changed = (key for change in candidate.changes for key in change.settings)
    mapping = explicit(candidate, (*_ALWAYS, *changed))
    written = {flag.name: given for flag in FLAGS if (given := _arguments(flag, mapping)) is not None}
    parsed = {name: values for name, (values, _) in written.items()}
    lost = _lost(mapping, parsed)
    kept = [
        written[flag.name][1] for flag in FLAGS if flag.name in written and ".".join(map(str, flag.path)) not in lost
    ]
    words = [" ".join(map(shlex.quote, option)) for options in kept for option in options]
    text = _folded(words)
    if lost:
        text += f"\n# only a workload file can set: {', '.join(lost)}"
    return text


def _arguments(flag: Flag, mapping: Mapping[str, Any]) -> tuple[Any, list[list[str]]] | None:
    """Return the values of a flag as a shell passes them, and the words to type; ``None`` where the key is not set."""
    value = setting(mapping, ".".join(map(str, flag.path)))
    if flag.path == ("gpu",) and isinstance(value, Mapping):
        value = value.get("base", "h200")
    if flag.path == ("model", "lora", "r") and value is None and setting(mapping, "model.lora") == {}:
        value = 8  # adapters with defaults only: one key says that there are adapters
    if value is None:
        return None
    if flag.kind == "switch":
        return value, [[flag.option if value else f"--no-{flag.option.removeprefix('--')}"]]
    if flag.kind == "pairs":
        texts = [f"{key}={inline(item)}" for key, item in value.items()]
    elif isinstance(value, bool):
        return str(value).lower(), [[flag.option, str(value).lower()]]
    elif flag.kind == "list" and not isinstance(value, str):
        texts = list(map(str, value))
    else:
        return str(value), [[flag.option, str(value)]]
    return texts, [[flag.option, text] for text in texts]


def _lost(mapping: Mapping[str, Any], parsed: Mapping[str, Any]) -> list[str]:
    """Return the names of the keys that are not the same after the options have been read again."""
    read = RawWorkload.of(None).with_flags(parsed).check()
    found = read.to_mapping() if isinstance(read, Workload) else {}
    after = _flat(found)
    return [key for key, value in _flat(mapping).items() if after.get(key, defaults().get(key)) != value]


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted names; the values of a section's own key are one value."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        is_section = isinstance(value, Mapping) and name in (
            "model",
            "model.lora",
            "model.quantization",
            "data",
            "train",
            "parallel",
            "software",
            "gpu",
        )
        flat |= _flat(value, f"{name}.") if is_section and value else {name: value}
    return flat


def _folded(words: list[str]) -> str:
    """Join options with blanks, in lines of at most ``WIDTH`` columns that end with a backslash."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) + 2 > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
