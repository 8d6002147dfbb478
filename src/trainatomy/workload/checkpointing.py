"""Keys of ``train.gradient_checkpointing_kwargs``: those of PyTorch's checkpoints, and those that the Trainer takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainatomy.workload.nearest import suggestion
from trainatomy.workload.section import Problem, refuse

if TYPE_CHECKING:
    from trainatomy.workload.train import TrainSpec

EVERY, OFFLOAD = "every_n_layers", "offload"
"""Keys that the Trainer of transformers 5.16 and later takes for itself."""
NEW_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names of ``TrainingArguments`` of transformers 5.24, and the older ones, which still hold."""
_KINDS = {"use_reentrant": bool, "preserve_rng_state": bool, "determinism_check": str, OFFLOAD: bool}


def move_every(raw: dict[str, Any]) -> dict[str, Any]:
    """Write ``gradient_checkpointing_kwargs: {every_n_layers: 2}`` as ``gradient_checkpointing_every: 2``.

    The loops then need no release of transformers that knows the former.  Where the value is not valid or both are set
    to different values, nothing is moved, and ``problems`` says so.
    """
    given = raw.get("gradient_checkpointing_kwargs")
    if not isinstance(given, Mapping):
        return raw
    rest = {name: value for name, value in given.items() if (name, value) != (OFFLOAD, False)}
    every = rest.get(EVERY)
    if _is_count(every) and raw.get("gradient_checkpointing_every", every) == every:
        del rest[EVERY]
        raw = {**raw, "gradient_checkpointing_every": every}
    return raw if rest == given else {**raw, "gradient_checkpointing_kwargs": rest or None}


def with_old_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Write ``activation_checkpointing: true`` as ``gradient_checkpointing: true``; refuse two values for the two.

    None, the default of transformers 5.24, leaves a setting unsaid.
    """
    unsaid = {*NEW_NAMES, "gradient_checkpointing"}
    raw = {name: value for name, value in raw.items() if not (value is None and name in unsaid)}
    if found := [
        Problem((new,), f"is {raw[new]!r}, but {old} is {raw[old]!r}: set one of the two")
        for new, old in NEW_NAMES.items()
        if new in raw and raw.get(old, raw[new]) != raw[new]
    ]:
        refuse(found)
    return {NEW_NAMES.get(name, name): value for name, value in raw.items()}


def offloads(keys: Mapping[str, Any] | None) -> bool:
    """Return whether these arguments keep checkpoints in host memory."""
    return bool((keys or {}).get(OFFLOAD))


def problems(train: TrainSpec) -> list[Problem]:
    """Refuse arguments that PyTorch's checkpoints do not have, values of other types, and a choice among no layers."""
    here = "gradient_checkpointing_kwargs"
    found = []
    if train.gradient_checkpointing_every > 1 and not train.gradient_checkpointing:
        found.append(Problem(("gradient_checkpointing_every",), "needs gradient_checkpointing: true"))
    for name, value in (train.gradient_checkpointing_kwargs or {}).items():
        if name == EVERY:
            found.append(Problem((here, name), _problem_of_every(value, train.gradient_checkpointing_every)))
        elif name not in _KINDS:
            found.append(Problem((here, name), f"unknown key{suggestion(name, _KINDS)}"))
        elif not isinstance(value, _KINDS[name]):
            wanted = "true or false" if _KINDS[name] is bool else "a string"
            found.append(Problem((here, name), f"must be {wanted}, found {value!r}"))
    return found


def _problem_of_every(value: Any, every: int) -> str:
    """Return what is wrong with ``every_n_layers``, which ``move_every`` left where it was."""
    if _is_count(value):
        return f"is {value}, but gradient_checkpointing_every is {every}: set one of the two"
    return f"must be a whole number of at least 1, found {value!r}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
