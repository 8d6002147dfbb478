"""Quantised weights of a workload, by the names of transformers' ``BitsAndBytesConfig`` and ``TorchAoConfig``.

Methods of quantisation by transformers' names: which are simulated, and why the others are refused.

Source: transformers 5.17, quantizers/quantizer_*.py (``validate_environment``, ``is_trainable``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainatomy.workload.section import Amount, Fraction, Names, Problem, Section, refuse, spell_dtype

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


SIMULATED = ("bitsandbytes", "torchao")
DEQUANTISED = ("mxfp4", "fp8", "mxfp8", "compressed-tensors")
"""Methods whose weights transformers dequantises while it loads them where ``dequantize`` is true."""

LIBRARIES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "hqq": "hqq",
    "torchao": "torchao",
    "compressed-tensors": "compressed-tensors",
    "quanto": "optimum-quanto",
    "aqlm": "aqlm",
    "auto-round": "auto-round",
    "fbgemm_fp8": "fbgemm-gpu",
    "eetq": "the hub's kernels",
    "fp8": "the hub's kernels",
    "mxfp8": "the hub's kernels",
    "mxfp4": "the hub's kernels",
}
"""Where the kernels of a method come from."""

_FROZEN = frozenset(
    "auto-round fbgemm_fp8 fp8 mxfp8 gguf higgs metal mxfp4 nvfp4 quark spqr vptq".split(),
)
"""Methods whose models transformers' Trainer refuses to train, adapters included (``is_trainable`` is False)."""


def refusal(method: str, *, dequantize: bool) -> str | None:
    """Return why weights quantised by a method cannot be predicted; None where they can.

    Args:
        method: Its name in ``quantization_config``.
        dequantize: Whether weights are dequantised while they are loaded.
    """
    if method in SIMULATED or (method in DEQUANTISED and dequantize):
        return None
    choices = "choose bitsandbytes or torchao, or leave quantization out to predict the dense model"
    if method in DEQUANTISED:
        choices = f"set dequantize: true where the checkpoint is stored so, or {choices}"
    library = LIBRARIES.get(method)
    if method in _FROZEN:
        by = "" if library is None else f" (by {library})"
        return f"transformers does not train weights quantised by {method}{by}, and they are not simulated: {choices}"
    with_it = "" if library is None else f", with {library} installed or without"
    return f"weights quantised by {method} are not simulated{with_it}: {choices}"


_OWN = ("prepare_model_for_kbit_training", "llm_int8_outlier_columns", "bnb_4bit_experts")
"""Keys that ``BitsAndBytesConfig`` does not have."""
_TORCHAO_TYPES = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
"""Classes of torchao whose weights are simulated; products with others run kernels that are not PyTorch's."""
_OF_TORCHAO = ("quant_type", "modules_to_not_convert")
_OF_OTHERS = ("quant_method", *_OF_TORCHAO, "dequantize")


class QuantizationSpec(Section):
    """Weights in 4 or 8 bits; names, meaning and defaults are those of ``BitsAndBytesConfig`` and ``TorchAoConfig``."""

    quant_method: str = Field(
        default="bitsandbytes",
        description="the library: bitsandbytes, torchao, or with `dequantize` how the checkpoint is stored: mxfp4, "
        "fp8, mxfp8 or compressed-tensors; others are refused by name",
    )
    load_in_4bit: bool = Field(default=False, description="store the weights of linear layers in 4 bits")
    load_in_8bit: bool = Field(default=False, description="store the weights of linear layers in 8 bits (LLM.int8)")
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = Field(default="fp4", description="the 4-bit numbers")
    bnb_4bit_use_double_quant: bool = Field(
        default=False, description="quantise the scales of the 4-bit weights as well, to 8 bits"
    )
    bnb_4bit_compute_dtype: Annotated[Literal["float32", "bfloat16", "float16"], BeforeValidator(spell_dtype)] = Field(
        default="float32", description="dtype in which layers with 4-bit weights compute"
    )
    bnb_4bit_quant_storage: Annotated[
        Literal["uint8", "float32", "bfloat16", "float16"], BeforeValidator(spell_dtype)
    ] = Field(default="uint8", description="dtype of the tensors that 4-bit weights are packed into")
    bnb_4bit_experts: bool = Field(
        default=False,
        description=(
            "quantise the experts of a layer that are one parameter, too, as axolotl's quantize_moe_experts does "
            "(trainatomy's own key)"
        ),
    )
    llm_int8_threshold: Amount = Field(
        default=6.0,
        description="columns with an activation of at least this value are multiplied in 16 bits instead of 8; 0: none",
    )
    llm_int8_outlier_columns: Fraction = Field(
        default=0.0,
        description=(
            "share of the columns of activations that reach llm_int8_threshold, from 0 to 1 (trainatomy's own key)"
        ),
    )
    llm_int8_skip_modules: Names | None = Field(
        default=None,
        description="modules that are not quantised, neither in 8 nor in 4 bits (default: the output layer)",
    )
    quant_type: str | dict[str, Any] | None = Field(
        default=None,
        description="torchao: the name of its configuration, Int8WeightOnlyConfig or Float8WeightOnlyConfig, or "
        "the mapping that `config.json` has for it",
    )
    modules_to_not_convert: Names | None = Field(
        default=None, description="torchao: modules that are not quantised (default: the output layer)"
    )
    dequantize: bool = Field(
        default=False, description="dequantise weights that are stored quantised while they are loaded"
    )
    prepare_model_for_kbit_training: bool = Field(
        default=True,
        description="call peft's function of this name before adapters are added: weights that are not quantised are "
        "cast to float32 (trainatomy's own key)",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_methods(cls, given: Any) -> Any:
        """Refuse methods that are not simulated as a whole: their keys are not known here."""
        method = given.get("quant_method") if isinstance(given, Mapping) else None
        if isinstance(method, str) and method != "bitsandbytes":
            why = refusal(method, dequantize=bool(given.get("dequantize")))
            if why is not None:
                refuse([Problem((), why)])
        return given

    def contradictions(self) -> list[Problem]:
        """Refuse two methods at once, and keys that the method does not read."""
        if self.quant_method != "bitsandbytes":
            return self._of_other_method()
        if self.load_in_4bit and self.load_in_8bit:
            return [Problem(("load_in_8bit",), "cannot be combined with load_in_4bit: leave one of the two out")]
        foreign = next((name for name in (*_OF_TORCHAO, "dequantize") if name in self._named()), None)
        if foreign is not None:
            method = " or ".join(DEQUANTISED) if foreign == "dequantize" else "torchao"
            return [Problem((foreign,), f"has no effect without quant_method: {method}")]
        read = {
            "bnb_4bit": self.load_in_4bit,
            "llm_int8_threshold": self.load_in_8bit,
            "llm_int8_outlier_columns": self.load_in_8bit,
            "llm_int8_skip_modules": self.is_set,
        }
        return [
            Problem((name,), f"has no effect without {'load_in_4bit' if name.startswith('bnb') else 'load_in_8bit'}")
            for name in self._named()
            for start, is_read in read.items()
            if name.startswith(start) and not is_read
        ]

    def _of_other_method(self) -> list[Problem]:
        """Refuse keys that a method does not read."""
        is_torchao = self.quant_method == "torchao"
        read = {"quant_method", *(_OF_TORCHAO if is_torchao else ("dequantize",))}
        unread = [Problem((name,), f"has no effect with {self.quant_method}") for name in self._named() - read]
        if unread or not is_torchao:
            return unread
        named = self.torchao_type
        if named in _TORCHAO_TYPES:
            return []
        found = "names no configuration" if named is None else f"{named} is not simulated"
        return [Problem(("quant_type",), f"{found}: choose {' or '.join(_TORCHAO_TYPES)}")]

    def _named(self) -> set[str]:
        """Return the keys that differ from their defaults."""
        return set(self.model_dump(mode="json", exclude_defaults=True))

    @property
    def torchao_type(self) -> str | None:
        """Return the name of torchao's configuration."""
        if not isinstance(self.quant_type, dict):
            return self.quant_type
        inner = self.quant_type.get("default", self.quant_type)
        named = inner.get("_type") if isinstance(inner, dict) else None
        return None if named is None else str(named)

    @property
    def is_dequantised(self) -> bool:
        """Return whether the weights of a checkpoint become dense while they are loaded."""
        return self.quant_method in DEQUANTISED

    @property
    def is_set(self) -> bool:
        """Return whether weights are quantised while they are loaded; a checkpoint may be stored quantised as well."""
        return self.load_in_4bit or self.load_in_8bit or self.quant_method == "torchao"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``BitsAndBytesConfig`` that differ from its defaults."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={*_OWN, *_OF_OTHERS})


def outlier_columns(workload: Workload) -> float:
    """Return the share of the columns of activations that LLM.int8 multiplies in 16 bits."""
    spec = workload.model.quantization
    return 0.0 if spec is None else spec.llm_int8_outlier_columns
