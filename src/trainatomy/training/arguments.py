"""``TrainingArguments`` of a workload, for the real Trainer and for the optimizer of the plain loop."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library
from trainatomy.workload.arguments import is_class_path

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trainatomy.workload.schema import Workload
    from trainatomy.workload.train import TrainSpec

_QUIET: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "log_level": "error",
}
"""Nothing but the step: no reports, no files, no evaluation, no progress bar."""

_HOST: dict[str, Any] = {"dataloader_pin_memory": False, "dataloader_num_workers": 0}
"""How batches are loaded: whatever the workload says, for it takes nothing of the GPU's memory."""


def training_arguments(workload: Workload, *, steps: int, output_dir: str, use_cpu: bool) -> TrainingArguments:
    """The arguments of a training of ``steps`` optimizer steps.

    Raises ``WorkloadError`` where transformers refuses a value (in its words), ``MissingLibrary`` without accelerate.
    """
    import_library("accelerate", "the Trainer")
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    given = {name: value for name, value in _given(workload.train).items() if name in known}
    try:
        made = TrainingArguments(output_dir=output_dir, max_steps=steps, use_cpu=use_cpu, **_QUIET, **_HOST, **given)
    except ValueError as error:
        raise WorkloadError(f"train: {error}") from error
    made._n_gpu = min(made.n_gpu, 1)  # one GPU, where the Trainer would take all of the machine's
    return made


def _given(train: TrainSpec) -> dict[str, Any]:
    """The settings as transformers takes them; it does not know the path of an optimizer's class."""
    values = {name: value for name, value in train if value is not None and name not in _HOST}
    if isinstance(values.get("optim_target_modules"), tuple):
        values["optim_target_modules"] = list(values["optim_target_modules"])
    if is_class_path(train.optim):
        values = {name: value for name, value in values.items() if name not in {"optim", "optim_args"}}
    return values
