"""The model of a workload: architecture, dtype, attention and adapters.

The software of a workload: PyTorch's version, the settings of its allocator, the source of cuDNN's workspaces.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainatomy.catalog.versions import parse_version, version_note
from trainatomy.errors import WorkloadError
from trainatomy.workload.factory import Factory  # pydantic reads annotations when it runs
from trainatomy.workload.quantization import QuantizationSpec
from trainatomy.workload.section import (
    Count,
    Fraction,
    Integer,
    Names,
    Problem,
    Section,
    Settings,
    Text,
    listed,
    spell_dtype,
)

_VERSION = re.compile(r"\d+\.\d+(\.\d+)?([a-z+.-]\S*)?")
_SETTING = re.compile(r"\s*\w+\s*:\s*(\[[^\[\]]*\]|[^,\[\]\s]+)\s*")


def _version(value: Any) -> Any:
    """Refuse numbers (YAML reads 2.10 as 2.1), malformed versions, and releases whose rules are not known."""
    if isinstance(value, int | float):
        raise PydanticCustomError("version", 'is read as a number: put it in quotes, as in torch: "2.10"')
    if isinstance(value, str) and not _VERSION.fullmatch(value):
        raise PydanticCustomError("version", 'must be a version such as "2.11" or "2.11.0"')
    if isinstance(value, str):
        try:
            version_note("torch", parse_version(value))
        except WorkloadError as error:
            raise PydanticCustomError("version", "{reason}", {"reason": str(error)}) from None
    return value


def _settings(text: str) -> str:
    """Check the syntax; which settings exist depends on PyTorch's version and is checked by the simulated allocator."""
    for setting in re.split(r",(?![^\[]*\])", text.rstrip(", ")) if text.strip() else ():
        if not _SETTING.fullmatch(setting):
            message = 'must look like "expandable_segments:True,max_split_size_mb:128", found {setting}'
            raise PydanticCustomError("settings", message, {"setting": repr(setting.strip())})
    return text


AllocatorSettings = Annotated[str, AfterValidator(_settings)]
"""Allocator settings in the syntax of ``PYTORCH_ALLOC_CONF``."""


class SoftwareSpec(Section):
    """The software that is simulated: PyTorch's version, and where cuDNN's choices come from."""

    torch: Annotated[str, BeforeValidator(_version)] | None = Field(
        default=None,
        description='version of PyTorch to simulate, such as `"2.11"` (default: the installed one)',
    )
    cudnn: Literal["auto", "library", "rules"] = Field(
        default="auto",
        description="workspaces of convolutions: `library`: as cuDNN's own library chooses (9.8 or newer, it needs no "
        "GPU), `rules`: by rules, `auto`: `library` where it is installed",
    )


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
UNSIMULATED_ATTENTION = ("flash_attention_3", "flash_attention_4")
"""Attention of the flash-attn package that can be measured, but not predicted."""
CUT_CROSS_ENTROPY: Final = "cut_cross_entropy"
LORA_KERNELS: Final = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
Kernel = Literal["cut_cross_entropy", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"]
"""Layers of a model that are replaced by a library's."""


class LoraSpec(Section):
    """Low-rank adapters; names, meaning and defaults are those of ``peft.LoraConfig``."""

    r: Count = Field(default=8, description="rank of the adapters; this or any other option of LoRA adds them")
    lora_alpha: Integer = Field(default=8, description="numerator of the adapters' scale")
    target_modules: str | tuple[str, ...] | None = Field(
        default=None,
        description="modules with an adapter: a list of names, a regular expression, or `all-linear` "
        "(default: peft's choice for the architecture)",
    )
    lora_dropout: Fraction = Field(default=0.0, description="dropout before the adapters")
    bias: Literal["none", "all", "lora_only"] = Field(default="none", description="which biases are trained")
    modules_to_save: Names | None = Field(default=None, description="modules to copy and train in full")
    use_rslora: bool = Field(default=False, description="scale by the square root of the rank")
    use_dora: bool = Field(default=False, description="decompose the weights into magnitude and direction")
    lora_bias: bool = Field(default=False, description="add a bias to the adapters' second matrix")
    task_type: str | None = Field(default=None, description="peft's task type, such as `SEQ_CLS` or `CAUSAL_LM`")
    exclude_modules: str | tuple[str, ...] | None = Field(default=None, description="modules without an adapter")
    fan_in_fan_out: bool = Field(default=False, description="the targets store their weight transposed")
    init_lora_weights: bool | str = Field(default=True, description="initialisation of the adapters")
    layers_to_transform: int | tuple[int, ...] | None = Field(
        default=None, description="indices of the layers with adapters"
    )
    layers_pattern: str | tuple[str, ...] | None = Field(
        default=None, description="name of the module list that holds the layers"
    )
    rank_pattern: Settings = Field(default_factory=dict, description="rank by module")
    alpha_pattern: Settings = Field(default_factory=dict, description="alpha by module")
    target_parameters: Names | None = Field(default=None, description="parameters (instead of modules) with an adapter")
    trainable_token_indices: tuple[int, ...] | dict[str, tuple[int, ...]] | None = Field(
        default=None, description="indices of tokens whose embeddings are trained"
    )
    layer_replication: tuple[tuple[int, int], ...] | None = Field(
        default=None, description="ranges of layers to repeat"
    )
    ensure_weight_tying: bool = Field(default=False, description="keep tied weights tied when they get adapters")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``peft.LoraConfig`` that differ from its defaults, with lists instead of tuples."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _mistake(pattern: str) -> str | None:
    """Return what is wrong with a regular expression, if anything is."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None


class ModelSpec(Section):
    """The model: one of ``id``, ``class`` with ``config``, or ``factory``."""

    id: Text | None = Field(
        default=None,
        description="name on the Hugging Face hub, or a local folder; common architectures ship with trainatomy and "
        "need no network (`trainatomy models`)",
    )
    class_: Text | None = Field(
        default=None,
        validation_alias="class",
        serialization_alias="class",
        description="name of a transformers class (default: the configuration's own); needs `id` or `config`",
    )
    config: Settings = Field(default_factory=dict, description="values that override the model's configuration")
    attn_implementation: Text | None = Field(
        default=None,
        description="attention kernels: `sdpa`, `eager` or another name that transformers knows (default: its choice)",
    )
    dtype: Annotated[Dtype, BeforeValidator(spell_dtype)] = Field(
        default="auto",
        description="dtype of the weights; `auto`: that of the configuration, or float32 if it names none",
    )
    lora: LoraSpec | None = Field(default=None, description="train low-rank adapters (peft) instead of all weights")
    peft: Settings = Field(
        default_factory=dict,
        description="train by another of peft's methods than LoRA: `peft_type` and the arguments of its configuration, "
        "such as `{peft_type: VERA, target_modules: all-linear}`",
    )
    quantization: QuantizationSpec | None = Field(
        default=None, description="load the weights quantised, in 4 or 8 bits (bitsandbytes, torchao)"
    )
    freeze: Names = Field(
        default=(), description="parameters that are not trained, as patterns of their names such as `*.embeddings.*`"
    )
    freeze_except: Names = Field(
        default=(),
        description="regular expressions: only parameters whose names begin with a match are trained",
    )
    enable_input_require_grads: bool = Field(
        default=False,
        description="let gradients reach the outputs of frozen embeddings, as the function of transformers does",
    )
    freeze_vision_tower: bool = Field(
        default=False,
        description="do not train towers that see or hear, where the model has them, and give them no adapters",
    )
    freeze_multi_modal_projector: bool = Field(
        default=False, description="the same for what projects their output into the language model"
    )
    frozen_tower: Literal["checkpointed", "kept", "without_grad"] = Field(
        default="checkpointed",
        description="what a tower that is not trained keeps for backward, where adapters and checkpointing let its "
        "inputs require gradients: checkpoints, as transformers does, all activations, as LLaMA-Factory, or nothing, "
        "as ms-swift",
    )
    trainable_dtype: Annotated[Dtype, BeforeValidator(spell_dtype)] | None = Field(
        default=None, description="dtype to which the weights that are trained are cast (default: they keep theirs)"
    )
    float32_parameters: Names = Field(
        default=(),
        description="regular expressions: parameters whose names begin with a match are cast to float32",
    )
    kernels: Annotated[tuple[Kernel, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="layers that are replaced as axolotl replaces them: `cut_cross_entropy`, a loss that never stores "
        "logits; `lora_mlp_kernel`, `lora_qkv_kernel`, `lora_o_kernel`, layers with adapters that keep less",
    )
    factory: Factory | None = Field(
        default=None,
        description="`package.module:build` or `path/to/file.py:build`: a function that returns an `nn.Module`; "
        "relative paths start from the folder of the workload file",
    )
    factory_arguments: Settings = Field(default_factory=dict, description="arguments of that function, by their names")

    @property
    def is_quantised(self) -> bool:
        """Return whether weights are packed while they are loaded, or said to be packed in the checkpoint."""
        return self.quantization is not None and not self.quantization.is_dequantised

    @property
    def says_what_is_trained(self) -> bool:
        """Return whether parameters are named that are trained or not, or a method of peft besides LoRA."""
        return bool(self.freeze or self.freeze_except or self.peft)

    @property
    def has_adapters(self) -> bool:
        """Return whether peft adds what is trained, and freezes the rest."""
        return self.lora is not None or bool(self.peft)

    def contradictions(self) -> list[Problem]:
        """Refuse a section that names no model, and expressions that are none."""
        if self.factory is None and self.id is None and self.class_ is None:
            return [Problem((), "names no model: give `id`, or `class` with `config`, or `factory`")]
        if self.peft and not isinstance(self.peft.get("peft_type"), str):
            return [Problem(("peft",), "needs `peft_type`, the name of a method of peft, such as VERA or IA3")]
        return [
            Problem((key,), f"{pattern!r} is no regular expression: {reason}")
            for key in ("freeze_except", "float32_parameters")
            for pattern in getattr(self, key)
            if (reason := _mistake(pattern)) is not None
        ]
