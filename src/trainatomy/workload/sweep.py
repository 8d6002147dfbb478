"""Sweeps: one training for each value of a setting, such as ``per_device_train_batch_size=1,2,4,8``.

The samples of an optimizer step on all GPUs, and the accumulation that keeps their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml

from trainatomy.errors import WorkloadError
from trainatomy.workload.arguments import arguments
from trainatomy.workload.document import suggestion
from trainatomy.workload.overrides import BY_NAME, FLAGS, merge
from trainatomy.workload.schema import Workload
from trainatomy.workload.sentence_transformers import compares_in_batch


def effective_batch_size_of(workload: Workload) -> int:
    """Return the samples of an optimizer step: batch size × accumulation steps × data-parallel ranks."""
    train = workload.train
    ranks = workload.parallel.data_parallel_size
    return train.per_device_train_batch_size * train.gradient_accumulation_steps * ranks


def accumulation_for(workload: Workload, samples: int, batch_size: int | None = None) -> int | None:
    """Return the accumulation steps that give a step this many samples; ``None`` if the batches do not divide them.

    Args:
        workload: The training.
        samples: Samples of an optimizer step on all GPUs.
        batch_size: Samples per batch and GPU; None for those of the workload.
    """
    size = batch_size or workload.train.per_device_train_batch_size
    steps, rest = divmod(samples, size * workload.parallel.data_parallel_size)
    return steps if steps and not rest else None


def with_effective_batch_size(workloads: Iterable[Workload], samples: int) -> tuple[Workload, ...]:
    """Return training runs with the accumulation steps that give each of them this many samples in an optimizer step.

    Raises:
        WorkloadError: A batch size times the number of data-parallel ranks does not divide ``samples``; lists all.
    """
    found, problems = [], []
    for workload in workloads:
        steps = accumulation_for(workload, samples)
        if workload.mode != "training":
            problems.append(f"{workload.display_name}: inference has no optimizer step")
        elif compares_in_batch(workload) and steps != workload.train.gradient_accumulation_steps:
            loss = workload.sentence_transformers.loss
            problems.append(f"{workload.display_name}: {loss} compares the samples of a batch: set its size instead")
        elif steps is None:
            problems.append(f"{workload.display_name}: {_indivisible(workload, samples)}")
        else:
            found.append(workload.replace("train.gradient_accumulation_steps", steps))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise WorkloadError(f"effective batch size {samples} cannot be reached:\n{lines}")
    return tuple(found)


def _indivisible(workload: Workload, samples: int) -> str:
    """Return what does not divide the samples, and what to change."""
    size, ranks = workload.train.per_device_train_batch_size, workload.parallel.data_parallel_size
    each = f"{size} samples × {ranks} data-parallel ranks = {size * ranks}" if ranks > 1 else f"batch size {size}"
    if samples % ranks:
        return f"{each} does not divide {samples}; give a multiple of {ranks}"
    return f"{each} does not divide {samples}; choose a per_device_train_batch_size that divides {samples // ranks}"


MAX_ROWS = 1000
"""More training runs than anybody compares: a mistyped sweep."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A setting and its values.

    Attributes:
        key: The setting as it was typed, for the names of rows.
        values: Each value as it was typed, and as flags (see ``RawWorkload.with_flags``).
    """

    key: str
    values: tuple[tuple[str, Mapping[str, Any]], ...]


def sweep(workloads: Sequence[Workload], texts: Sequence[str]) -> tuple[Workload, ...]:
    """Return every workload with every combination of values, the last setting changing fastest.

    Args:
        workloads: The workloads to vary. The rows are named by their values.
        texts: ``KEY=V1,V2,…``, where KEY is a name of TrainingArguments, a flag, or a dotted key of a workload file
            (``data.sequence_length``, ``config.num_hidden_layers``, ``model.config.num_hidden_layers``). A value with
            commas is put in brackets
            (``lora_target_modules=[q_proj,v_proj],all-linear``).

    Raises:
        WorkloadError: Names the sweep.
    """
    sweeps = [parse(text) for text in texts]
    if not sweeps:
        return tuple(workloads)
    _refuse_repeats(sweeps)
    combinations = list(product(*(each.values for each in sweeps)))
    if (count := len(workloads) * len(combinations)) > MAX_ROWS:
        raise WorkloadError(f"--sweep: {count:,} training runs are more than {MAX_ROWS:,}; sweep fewer values")
    several = len(workloads) > 1
    return tuple(_set(workload, sweeps, values, several) for workload in workloads for values in combinations)


def parse(text: str) -> Sweep:
    """Parse ``KEY=V1,V2``; raise ``WorkloadError`` for an unknown key or a missing value."""
    key, equals, raw = text.partition("=")
    key = key.strip().removeprefix("--").replace("-", "_")
    if not equals or not key or not raw.strip():
        raise WorkloadError(f"--sweep must look like KEY=VALUE,VALUE,…, found {text!r}")
    values = _values(text, raw)
    if len(set(map(repr, values))) < len(values):
        raise WorkloadError(f"--sweep {text}: a value is given twice")
    return Sweep(key, tuple((_shown(value), _override(text, key, value)) for value in values))


def _values(text: str, raw: str) -> list[Any]:
    """Return the values as they were typed, in the syntax of a YAML list: ``4`` stays "4", ``[a, b]`` is a list."""
    try:
        node = yaml.compose(f"[{raw}]", Loader=yaml.SafeLoader)
        values = _typed(node)
    except (yaml.YAMLError, AttributeError, ValueError):
        raise WorkloadError(f"--sweep {text}: the values cannot be read; write VALUE,VALUE,… or [A,B],[C]") from None
    if not isinstance(values, list) or not values or "" in values:
        raise WorkloadError(f"--sweep {text}: a value is missing between two commas")
    return values


def _typed(node: Any) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode):
        return [_typed(each) for each in node.value]
    raise ValueError("a mapping")


def _shown(value: Any) -> str:
    return f"[{','.join(map(_shown, value))}]" if isinstance(value, list) else str(value)


def _override(text: str, key: str, value: Any) -> dict[str, Any]:
    """Return the flag for a setting, given by its name or as a dotted key, with its value."""
    if key in BY_NAME:
        return {key: value}
    path = tuple(key.split("."))
    for flag in FLAGS:
        if flag.path == path:
            return {flag.name: value}
        for prefix in (flag.path, (flag.name,)) if flag.kind == "pairs" else ():
            if path[: len(prefix)] == prefix and len(path) > len(prefix) and all(path):
                return {flag.name: [f"{'.'.join(path[len(prefix) :])}={_shown(value)}"]}
    if key.removeprefix("train.") in arguments().names():
        return {key.removeprefix("train."): value}  # accepted, or refused with a reason, by `with_flags`
    if meant := arguments().synonyms.get(key):
        raise WorkloadError(f"--sweep {text}: unknown setting {key!r}; did you mean {meant}?", key=key)
    known = [*BY_NAME, *(".".join(map(str, flag.path)) for flag in FLAGS)]
    if path[0] == "config" and all(path[1:]):
        raise WorkloadError(f"--sweep {text}: unknown setting {key!r}; did you mean model.{key}?", key=key)
    raise WorkloadError(f"--sweep {text}: unknown setting {key!r}{suggestion(key, known)}", key=key)


def _refuse_repeats(sweeps: Sequence[Sweep]) -> None:
    seen: dict[str, str] = {}
    for each in sweeps:
        (name, value), *_ = each.values[0][1].items()
        full = f"{name} {value[0].partition('=')[0]}" if isinstance(value, list) and "=" in value[0] else name
        if full in seen:
            raise WorkloadError(f"--sweep sets {each.key} twice: write its values in one list")
        seen[full] = each.key


def _set(
    workload: Workload,
    sweeps: Sequence[Sweep],
    values: Sequence[tuple[str, Mapping[str, Any]]],
    several: bool,
) -> Workload:
    """Return ``workload`` with these values and named by them, after its own name where there are several workloads."""
    overrides: dict[str, Any] = {}
    for _, override in values:
        for name, value in override.items():
            below = overrides.get(name)
            overrides[name] = [*below, *value] if isinstance(below, list) and isinstance(value, list) else value
    label = ", ".join(f"{each.key}={shown}" for each, (shown, _) in zip(sweeps, values, strict=True))
    try:
        return merge(workload, {**overrides, "name": f"{workload.display_name}, {label}" if several else label})
    except WorkloadError as error:
        raise WorkloadError(f"--sweep, {label}: {error}") from None
