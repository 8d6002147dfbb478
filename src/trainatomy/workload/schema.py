"""A workload: one training (or inference) on one card, as a value.

``Workload`` is frozen, is made from a mapping with the keys of the YAML file, and can be written as one again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import WorkloadError
from trainatomy.workload.data import DEFAULT_SEQUENCE_LENGTH, DataSpec
from trainatomy.workload.explain import explain
from trainatomy.workload.gpu import GPUChoice, GPUOverride
from trainatomy.workload.loops import LOOPS, LoopName, describe_loops, unsupported_settings
from trainatomy.workload.model import Dtype, LoraSpec, ModelSpec
from trainatomy.workload.section import Count, Path, Problem, Section, Text, number_as_text
from trainatomy.workload.software import AllocatorSettings, SoftwareSpec
from trainatomy.workload.train import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEFAULT_SEQUENCE_LENGTH",
    "DataSpec",
    "Dtype",
    "GPUOverride",
    "LoraSpec",
    "ModelSpec",
    "SoftwareSpec",
    "TrainSpec",
    "Workload",
]

_LINE_BREAKS = frozenset("\x85\u2028\u2029")

FUSED_OPTIMIZERS = frozenset({"adamw_torch_fused"})


class Workload(Section):
    """The description of a training."""

    name: Text | None = Field(default=None, description="what to call it in tables")
    model: ModelSpec = Field(description="the model")
    data: DataSpec = Field(default_factory=DataSpec, description="the batch")
    loop: LoopName = Field(default="trainer", description=describe_loops())
    mode: Literal["training", "inference"] = Field(default="training", description="`training` or `inference`")
    zero_grad_set_to_none: bool = Field(
        default=True, description="gradients are released after a step, not filled with zeros"
    )
    train: TrainSpec = Field(default_factory=TrainSpec, description="the training's settings")
    gpu: GPUChoice = Field(
        default="h200", description="a card (`trainatomy gpus` lists them), or a mapping that changes one"
    )
    allocator: AllocatorSettings = Field(
        default="",
        description='PyTorch\'s allocator settings (`PYTORCH_ALLOC_CONF`), such as `"expandable_segments:True"`',
    )
    software: SoftwareSpec = Field(default_factory=SoftwareSpec, description="the software that is simulated")
    steps: Count | None = Field(
        default=None, description="optimizer steps to execute; without it, as many as the peak needs"
    )
    era: Annotated[Literal["2022"], BeforeValidator(number_as_text)] | None = Field(
        default=None, description="`\"2022\"`: what the software of the notebook's day did; without it, today's"
    )

    _places: dict[Path, str] = PrivateAttr(default_factory=dict)

    @field_validator("data", "train", "software", mode="before")
    @classmethod
    def _empty_section(cls, section: Any) -> Any:
        """``train:`` with nothing under it is a section without keys."""
        return {} if section is None else section

    @property
    def batch_size(self) -> int:
        """Samples in one forward: of training, or of inference, where the training's is the default."""
        train = self.train
        if self.mode == "inference" and train.per_device_eval_batch_size is not None:
            return train.per_device_eval_batch_size
        return train.per_device_train_batch_size

    def resolve_gpu(self) -> GPU:
        """The card: one that ships as data, or one of those with the changes that the workload names."""
        return find_gpu(self.gpu) if isinstance(self.gpu, str) else self.gpu.resolve_gpu()

    def where(self, *path: str | int) -> str:
        """Where a key was written, for messages: ``file.yaml:9: train.fp16``, ``--fp16``, or ``train.fp16``."""
        return self._places.get(path, ".".join(map(str, path)))

    def placed(self, places: Mapping[Path, str]) -> Self:
        """The same workload, which knows where its keys were written."""
        self._places.update(places)
        return self

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Make a workload from nested mappings with the keys of the YAML file.

        Raises ``WorkloadError`` that lists every problem, one a line.
        """
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            raise WorkloadError("\n".join(map(str, explain(error, mapping, cls)))) from None

    def to_mapping(self) -> dict[str, Any]:
        """What differs from the defaults, with the keys of the YAML file; ``from_mapping`` gives the workload back."""
        mapping = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return {key: value for key, value in mapping.items() if value != {} or key not in ("data", "train", "software")}

    def to_yaml(self) -> str:
        """``to_mapping`` as the text of a workload file.  Unicode's own line breaks are escaped: PyYAML loses them."""
        mapping = self.to_mapping()
        plain = not _LINE_BREAKS & set(json.dumps(mapping, ensure_ascii=False))
        return yaml.safe_dump(mapping, sort_keys=False, allow_unicode=plain)

    def digest(self) -> str:
        """SHA-256 (hex) of what a prediction depends on: equal for equal trainings, whatever their name."""
        mapping = {key: value for key, value in self.to_mapping().items() if key != "name"}
        return hashlib.sha256(json.dumps(mapping, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Equal descriptions, wherever they were written."""
        return isinstance(other, Workload) and self.to_mapping() == other.to_mapping()

    def __hash__(self) -> int:
        return hash(self.digest())

    def contradictions(self) -> list[Problem]:
        """What no section sees alone."""
        return [*self._unscalable_gradients(), *self._refused_by_loop(), *self._targets()]

    def _unscalable_gradients(self) -> list[Problem]:
        """GradScaler refuses float16 gradients when it unscales them (torch/amp/grad_scaler.py, ``_unscale_grads_``).

        It does so before clipping, and before the step of every optimizer that does not unscale inside its kernel.
        """
        model, train = self.model, self.train
        trains_halves = model.dtype == "float16" and model.lora is None
        unscales = train.max_grad_norm > 0 or train.optim not in FUSED_OPTIMIZERS
        if not (self.mode == "training" and train.fp16 and trains_halves and unscales):
            return []
        message = (
            "gradient scaling cannot unscale the float16 gradients of float16 weights "
            "(PyTorch raises `Attempting to unscale FP16 gradients.`): use dtype float32, or bf16, or leave fp16 out"
        )
        return [Problem(("train", "fp16"), message)]

    def _refused_by_loop(self) -> list[Problem]:
        """Return a problem for each setting that the loop cannot apply."""
        defaults = {name: field.default for name, field in TrainSpec.model_fields.items()}
        refused = unsupported_settings(LOOPS[self.loop], self.train, defaults)
        return [Problem(("train", name), reason) for name, reason in refused.items()]

    def _targets(self) -> list[Problem]:
        if self.model.lora is not None and self.model.freeze:
            return [Problem(("model", "freeze"), "cannot stand beside lora, which freezes all but the adapters")]
        return []
