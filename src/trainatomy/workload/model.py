"""The model of a workload: which one, with which weights, attention and adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainatomy.workload.factory import Factory  # pydantic reads annotations when it runs
from trainatomy.workload.section import Count, Fraction, Integer, Names, Problem, Section, Settings, Text

Dtype = Literal["float32", "bfloat16", "float16"]

_SPELLINGS = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def _spell_dtype(value: Any) -> Any:
    """``torch.bfloat16`` and ``bf16`` mean ``bfloat16``."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    return _SPELLINGS.get(name, name)


class LoraSpec(Section):
    """Low-rank adapters; names, meaning and defaults of ``peft.LoraConfig``."""

    r: Count = Field(default=8, description="rank of the adapters")
    lora_alpha: Integer = Field(default=8, description="scaling numerator of the adapters")
    target_modules: str | tuple[str, ...] | None = Field(
        default=None,
        description="modules that get an adapter: a list of names, a regular expression, or `all-linear`; "
        "without it, peft's choice for the architecture",
    )
    lora_dropout: Fraction = Field(default=0.0, description="dropout in front of the adapters")
    bias: Literal["none", "all", "lora_only"] = Field(default="none", description="which biases are trained")
    modules_to_save: Names | None = Field(default=None, description="modules that are trained in full, as copies")
    use_rslora: bool = Field(default=False, description="scale by the square root of the rank")
    use_dora: bool = Field(default=False, description="decompose the weights into magnitude and direction")
    lora_bias: bool = Field(default=False, description="give the adapters' second matrix a bias")
    task_type: str | None = Field(default=None, description="peft's task type, such as `SEQ_CLS` or `CAUSAL_LM`")
    exclude_modules: str | tuple[str, ...] | None = Field(default=None, description="modules that get no adapter")
    fan_in_fan_out: bool = Field(default=False, description="the targets store their weight transposed")
    init_lora_weights: bool | str = Field(default=True, description="how the adapters start")
    layers_to_transform: int | tuple[int, ...] | None = Field(
        default=None, description="indices of the layers with adapters"
    )
    layers_pattern: str | tuple[str, ...] | None = Field(
        default=None, description="name of the list that holds the layers"
    )
    rank_pattern: Settings = Field(default_factory=dict, description="ranks of single modules")
    alpha_pattern: Settings = Field(default_factory=dict, description="alphas of single modules")
    target_parameters: Names | None = Field(
        default=None, description="parameters, rather than modules, that get an adapter"
    )
    trainable_token_indices: tuple[int, ...] | dict[str, tuple[int, ...]] | None = Field(
        default=None, description="tokens whose embeddings are trained"
    )
    layer_replication: tuple[tuple[int, int], ...] | None = Field(default=None, description="layers to stack again")
    ensure_weight_tying: bool = Field(default=False, description="keep tied weights tied when they are adapted")

    def arguments(self) -> dict[str, Any]:
        """What to hand to ``peft.LoraConfig``: only what differs from its defaults; lists, not tuples."""
        return self.model_dump(mode="json", exclude_defaults=True)


class ModelSpec(Section):
    """Which model is trained.  One of ``id``, ``class`` with ``config``, or ``factory``."""

    id: Text | None = Field(
        default=None,
        description="name on the Hugging Face hub or a local folder; without network, an architecture that ships "
        "with trainatomy under that name",
    )
    class_: Text | None = Field(
        default=None,
        validation_alias="class",
        serialization_alias="class",
        description="name of a transformers class; without it, the configuration's own. "
        "With `config` no `id` is needed",
    )
    config: Settings = Field(default_factory=dict, description="overrides of the configuration")
    attn_implementation: Text | None = Field(
        default=None,
        description="`sdpa`, `eager` or another name that transformers knows; without it, transformers' choice",
    )
    dtype: Annotated[Dtype, BeforeValidator(_spell_dtype)] = Field(
        default="float32", description="dtype of the weights"
    )
    lora: LoraSpec | None = Field(default=None, description="train low-rank adapters (peft) instead of the weights")
    freeze: Names = Field(
        default=(), description="patterns of parameter names that are not trained, such as `*.embeddings.*`"
    )
    factory: Factory | None = Field(
        default=None,
        description="`package.module:build` or `path/to/file.py:build`, a function without arguments that returns an "
        "`nn.Module`; a file is looked for beside the workload file",
    )

    def contradictions(self) -> list[Problem]:
        """A model comes from one place; a factory decides alone what it builds."""
        if self.factory is None:
            if self.id is None and self.class_ is None:
                return [Problem((), "names no model: give `id`, or `class` with `config`, or `factory`")]
            return []
        decided = {
            "id": self.id is not None,
            "class": self.class_ is not None,
            "config": bool(self.config),
            "attn_implementation": self.attn_implementation is not None,
            "dtype": self.dtype != "float32",
        }
        return [
            Problem((key,), "cannot stand beside `factory`, which builds the model itself")
            for key, given in decided.items()
            if given
        ]
