"""Work that a command of one prediction can leave out: optional libraries that it cannot need, and Python's garbage.

transformers imports peft, datasets, torchao, sklearn and scipy wherever they are installed, and peft imports
bitsandbytes; together they take half the time of a small prediction.  To search what was imported for garbage takes
another seventh.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainatomy import cli
from trainatomy.catalog.architectures import architecture
from trainatomy.workload.arguments import arguments, is_own
from trainatomy.workload.loops import loop_of
from trainatomy.workload.schema import Workload

_QUANTISING = ("bitsandbytes", "torchao")
_OPTIONAL = ("peft", "bitsandbytes", "torchao", "datasets", "sklearn", "scipy")
_WITHOUT_SCIPY = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
"""Ends of the names of transformers' classes that need no scipy, but for FNet's: those that detect objects do."""


def skip_collections() -> None:
    """Let Python search for no garbage, in a process of the command line's own that makes one prediction and ends."""
    if cli.owns_process:
        gc.set_threshold(0)  # not gc.disable(): a simulation still freezes what exists before its training collects


def skip_unused_imports(
    workloads: Sequence[Workload], *, trust_remote_code: bool, also_needed: Sequence[str] = ()
) -> tuple[str, ...]:
    """Hide libraries that no workload can need, and return their names.

    They are hidden only in a process of the command line's own.

    Args:
        workloads: The training runs.
        trust_remote_code: True if code from the Hugging Face hub may run, which may need any library.
        also_needed: Libraries that are needed in any case.
    """
    if not cli.owns_process or trust_remote_code or any(map(_may_import_anything, workloads)):
        return ()
    needed = {*also_needed, *(name for workload in workloads for name in _needed(workload))}
    hidden = tuple(name for name in _OPTIONAL if name not in needed)
    for name in hidden:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    return hidden


def _may_import_anything(workload: Workload) -> bool:
    """Return whether code runs whose imports nobody knows: the user's, or a package of optimizers (GaLore's, …)."""
    data, optim = workload.data, workload.train.optim
    metrics = isinstance(data.compute_metrics, str) or data.preprocess_logits_for_metrics is not None
    package = arguments().package_of(optim)
    of_user = bool(workload.model.factory or data.factory or metrics or is_own(optim))
    return of_user or package not in (None, *_OPTIONAL)


def _needed(workload: Workload) -> set[str]:
    """Return the optional libraries that a workload may need."""
    needed = {*loop_of(workload).libraries, arguments().package_of(workload.train.optim) or ""}
    if workload.model.has_adapters or workload.trl.get("activation_offloading"):  # see training.trl
        needed |= {"peft", "bitsandbytes"}
    if workload.model.quantization is not None or _may_be_quantised(workload):
        needed |= {"peft", *_QUANTISING}
    if "sklearn" in needed or _may_need_scipy(workload):
        needed.add("scipy")
    return needed


def _may_need_scipy(workload: Workload) -> bool:
    known = architecture(workload.model.id) if workload.model.id is not None else None
    name = workload.model.class_ or (known.class_name if known is not None else "")
    return not name.endswith(_WITHOUT_SCIPY) or name.startswith("FNet")


def _may_be_quantised(workload: Workload) -> bool:
    """Return whether the weights may be stored quantised; those on the hub may."""
    name = workload.model.id
    if "quantization_config" in workload.model.config:
        return True
    if name is None or architecture(name) is not None:
        return False
    try:
        return "quantization_config" in json.loads((Path(name).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return True
