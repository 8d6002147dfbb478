"""The ``generation`` section: names, meaning and defaults of transformers' ``GenerationConfig`` (5.17)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from trainatomy.workload.section import Amount, Count, Fraction, Index, Section

CACHES = ("dynamic", "static")
"""Values of ``cache_implementation`` that are simulated."""

_OTHER_CACHES = {
    "offloaded": "keys and values in host memory are not simulated",
    "offloaded_static": "keys and values in host memory are not simulated",
    "quantized": "quantised keys and values are not simulated",
    "paged": "continuous batching is not simulated",
    "sliding_window": "left transformers in 5.0: a dynamic or static cache follows the model's own windows",
    "hybrid": "left transformers in 5.0: a dynamic or static cache follows the model's own windows",
}

_REFUSED = {
    "no_repeat_ngram_size": "bans n-grams by values that only a run on a GPU knows",
    "encoder_no_repeat_ngram_size": "bans n-grams by values that only a run on a GPU knows",
    "assistant_model": "assisted generation is not simulated: its steps depend on values",
    "prompt_lookup_num_tokens": "assisted generation is not simulated: its steps depend on values",
    "dola_layers": "left transformers in 5.0",
    "penalty_alpha": "contrastive search left transformers in 5.0",
    "num_beam_groups": "group beam search left transformers in 5.0",
    "constraints": "constrained beam search left transformers in 5.0",
    "compile_config": "compiled graphs are not simulated",
    "cache_config": "quantised keys and values are not simulated",
    "max_length": "counts the prompt too: set max_new_tokens",
    "max_time": "ends by the clock: set max_new_tokens",
    "stop_strings": "ends by values: all max_new_tokens are generated here",
}


def _cache(name: Any) -> Any:
    """Refuse caches that are not simulated, by name."""
    if name is not None and name not in CACHES:
        reason = _OTHER_CACHES.get(str(name), f"choose one of {', '.join(CACHES)}")
        raise PydanticCustomError("cache", "{name}: {reason}", {"name": str(name), "reason": reason})
    return name


class GenerationSpec(Section):
    """Generation by ``mode: generation``: the settings of ``GenerationConfig`` that change memory or time.

    Every sequence gets all its new tokens: where a real one ends depends on values.
    """

    max_new_tokens: Count | None = Field(default=None, description="tokens to generate for each prompt")
    num_beams: Count = Field(default=1, description="beams of beam search; 1: greedy decoding, or sampling")
    num_return_sequences: Count = Field(default=1, description="sequences for each prompt")
    do_sample: bool = Field(default=False, description="sample instead of taking the most probable token")
    temperature: Amount | None = Field(default=None, description="temperature of sampling")
    top_k: Index | None = Field(default=None, description="sample from the K most probable tokens")
    top_p: Fraction | None = Field(default=None, description="sample from the tokens of this total probability")
    min_p: Fraction | None = Field(default=None, description="sample from tokens of at least this relative probability")
    repetition_penalty: Amount | None = Field(default=None, description="penalty of tokens that occurred")
    length_penalty: Amount | None = Field(default=None, description="exponent of the length in beam search")
    early_stopping: bool = Field(default=False, description="end beam search with the first complete beams")
    use_cache: bool = Field(default=True, description="keep keys and values of earlier tokens")
    cache_implementation: Annotated[str | None, BeforeValidator(_cache)] = Field(
        default=None, description="`dynamic` (the default) grows with each token; `static` is allocated whole"
    )
    max_cache_len: Count | None = Field(default=None, description="tokens of a static cache, if more than needed")
    disable_compile: bool = Field(
        default=False, description="do not compile the forward with a static cache, as transformers does by default"
    )
    prefill_chunk_size: Count | None = Field(default=None, description="process the prompt in chunks of this length")
    output_scores: bool = Field(default=False, description="return the scores of each token")
    output_logits: bool = Field(default=False, description="return the logits of each token")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, raw: Any) -> Any:
        """Name what is not simulated, unless it is off."""
        if not isinstance(raw, Mapping):
            return raw
        off = {name for name, value in raw.items() if name in _REFUSED and value in (None, False, 0, [], {})}
        problems = [f"{name}: {_REFUSED[name]}" for name in raw if name in _REFUSED and name not in off]
        if problems:
            raise PydanticCustomError("generation", "{text}", {"text": "; ".join(problems)})
        return {name: value for name, value in raw.items() if name not in off}

    def settings(self) -> dict[str, Any]:
        """Return the arguments of ``GenerationConfig``."""
        found = {name: value for name, value in self if value is not None}
        returns = {"return_dict_in_generate": True} if self.output_scores or self.output_logits else {}
        return {**found, **returns}
