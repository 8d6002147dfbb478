"""Quantised weights of a workload, by the names of transformers' ``BitsAndBytesConfig``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainatomy.workload.section import Amount, Fraction, Names, Problem, Section, spell_dtype

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


_OWN = ("prepare_model_for_kbit_training", "llm_int8_outlier_columns")
"""Keys that ``BitsAndBytesConfig`` does not have."""


class QuantizationSpec(Section):
    """Weights in 4 or 8 bits (bitsandbytes); names, meaning and defaults are those of ``BitsAndBytesConfig``."""

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
    llm_int8_threshold: Amount = Field(
        default=6.0,
        description="activations from which on a column is multiplied in 16 bits instead of 8; 0: none is",
    )
    llm_int8_outlier_columns: Fraction = Field(
        default=0.0,
        description="share of the columns of activations that reach llm_int8_threshold, which depends on their values: "
        "from 0, the default, to 1, the most (trainatomy's own key)",
    )
    llm_int8_skip_modules: Names | None = Field(
        default=None,
        description="modules that are not quantised, in 4 bits neither (default: the output layer)",
    )
    prepare_model_for_kbit_training: bool = Field(
        default=True,
        description="call peft's function of this name before adapters are added: weights that are not quantised are "
        "cast to float32 (trainatomy's own key)",
    )

    def contradictions(self) -> list[Problem]:
        """Refuse two methods at once, and keys that the method does not read."""
        if self.load_in_4bit and self.load_in_8bit:
            return [Problem(("load_in_8bit",), "cannot be combined with load_in_4bit: leave one of the two out")]
        read = {
            "bnb_4bit": self.load_in_4bit,
            "llm_int8_threshold": self.load_in_8bit,
            "llm_int8_outlier_columns": self.load_in_8bit,
            "llm_int8_skip_modules": self.is_set,
        }
        return [
            Problem((name,), f"has no effect without {'load_in_4bit' if name.startswith('bnb') else 'load_in_8bit'}")
            for name in self.model_dump(mode="json", exclude_defaults=True)
            for start, is_read in read.items()
            if name.startswith(start) and not is_read
        ]

    @property
    def is_set(self) -> bool:
        """Return whether weights are quantised while they are loaded; a checkpoint may be stored quantised as well."""
        return self.load_in_4bit or self.load_in_8bit

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``BitsAndBytesConfig`` that differ from its defaults."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude=set(_OWN))


def outlier_columns(workload: Workload) -> float:
    """Return the share of the columns of activations that LLM.int8 multiplies in 16 bits."""
    spec = workload.model.quantization
    return 0.0 if spec is None else spec.llm_int8_outlier_columns


def quantised_problems(workload: Workload, *, is_quantised: bool) -> list[Problem]:
    """Return what cannot be done with quantised weights.

    Args:
        workload: The training or inference.
        is_quantised: Whether its weights are, which a checkpoint may decide.
    """
    if not is_quantised:
        return []
    train, found = workload.train, list[Problem]()
    if workload.mode == "training" and workload.model.lora is None:
        reason = "quantised weights cannot be trained: add model.lora, or ask for mode: inference"
        found.append(Problem(("model", "quantization"), reason))
    if workload.parallel.world_size > 1 and not _is_plain_ddp(workload):
        reason = "quantised weights on several GPUs are simulated with DDP only (parallel.strategy: ddp, no train.fsdp)"
        found.append(Problem(("parallel",), reason))
    if train.deepspeed is not None:
        found.append(
            Problem(("train", "deepspeed"), "is not simulated with quantised weights: leave one of the two out")
        )
    if workload.era is not None:
        found.append(Problem(("era",), "emulates libraries without layers of 4 and 8 bits: leave it out"))
    casts = [name for name in ("fp16_full_eval", "bf16_full_eval") if getattr(train, name)]
    if casts and workload.mode == "inference":
        found.append(Problem(("train", casts[0]), "casts the model, which transformers refuses for quantised weights"))
    return found


def _is_plain_ddp(workload: Workload) -> bool:
    """Return whether every GPU holds the whole model: layers of 4 and 8 bits are not sharded."""
    parallel = workload.parallel
    return (
        parallel.strategy in (None, "ddp")
        and parallel.data_parallel_size == parallel.world_size
        and not workload.train.fsdp
        and parallel.devices == 1
    )
