"""Generation without a GPU: keys and values, calls that are copied, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from executed import predicted, simulated

from trainatomy.errors import WorkloadError
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.simulator.watcher import Watcher
from trainatomy.workload import Workload

LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000,
}  # fmt: skip
GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 1000,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 1000,
}  # fmt: skip
PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Keys and values of two layers with two heads of 16 float32 values."""


def describe(model: str = "LlamaForCausalLM", config: dict[str, Any] = LLAMA, **generation: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": model, "config": config},
            "data": {"sequence_length": 32},
            "mode": "generation",
            "train": {"per_device_train_batch_size": 3},
            "generation": {"max_new_tokens": 6, **generation},
        }
    )


def cache_at_the_end(simulation: Simulation) -> int:
    """Return the largest total of requested keys and values that lived at once at the end of a call."""
    held: dict[int, int] = {}
    end = next(mark.event for mark in simulation.trace.marks if mark.name == "generation end")
    sizes: list[int] = []
    for action, number, size, _ in simulation.trace.events[:end]:
        if action == "alloc" and simulation.trace.labels.get(number) == "key_value_cache":
            held[number] = size
        elif action == "free":
            held.pop(number, None)
        sizes.append(sum(held.values()))
    return max(sizes)


def test_keys_and_values_grow_with_tokens_and_beams() -> None:
    greedy = predicted(describe()).generation
    assert greedy is not None
    assert greedy.cache_bytes_per_token == PER_TOKEN and greedy.sequences == 3
    assert greedy.cache_bytes == PER_TOKEN * 3 * (32 + 5)  # the last token is not fed back
    assert greedy.first_token_seconds and greedy.token_seconds
    beams = predicted(describe(num_beams=4)).generation
    assert beams is not None and beams.cache_bytes == 4 * greedy.cache_bytes and beams.sequences == 12


def test_the_bill_has_a_line_for_keys_and_values() -> None:
    simulation = simulated(describe())
    assert cache_at_the_end(simulation) >= PER_TOKEN * 3 * 37
    assert predicted(describe()).memory.components["key_value_cache"] > 0
    without = predicted(describe(use_cache=False))
    assert without.memory.components["key_value_cache"] == 0 and without.generation.cache_bytes == 0


def test_a_static_cache_is_allocated_whole() -> None:
    static = predicted(describe(cache_implementation="static", disable_compile=True)).generation
    assert static is not None and static.cache_bytes == PER_TOKEN * 3 * (32 + 6 - 1)


def test_a_sliding_window_bounds_the_cache() -> None:
    window = {**LLAMA, "sliding_window": 16, "head_dim": 16}
    found = predicted(describe("MistralForCausalLM", window)).generation
    assert found is not None and found.cache_bytes == PER_TOKEN * 3 * 15


@pytest.mark.parametrize(
    ("model", "config"), [("T5ForConditionalGeneration", T5), ("BartForConditionalGeneration", BART)]
)
def test_encoder_decoders_keep_keys_and_values_of_both_sides(model: str, config: dict[str, Any]) -> None:
    found = predicted(describe(model, config)).generation
    assert found is not None
    assert found.cache_bytes == 2 * 2 * 64 * 4 * 3 * (32 + 6)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2, "top_p": 0.9, "repetition_penalty": 1.2}],
    ids=str,
)
def test_copied_calls_are_what_execution_writes(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    copied = simulated(describe(**settings))
    with monkeypatch.context() as patch:
        patch.setattr(Watcher, "repeat_generation", lambda *arguments: False)
        executed = simulate(workload := describe(**settings), workload.resolve_gpu())
    assert copied.trace == executed.trace
    assert copied.generation == executed.generation
    assert copied.operations.operations == executed.operations.operations
    assert copied.operations.calls == executed.operations.calls


def test_every_token_is_generated() -> None:
    for settings in ({}, {"num_beams": 2}):
        names = [mark.name for mark in simulated(describe(**settings)).trace.marks]
        assert names.count("token") == 2 * 5  # the first token comes from the prompts
    one = predicted(describe(max_new_tokens=1)).generation
    assert one is not None and one.token_seconds is None


def test_the_middle_token_stands_for_the_others() -> None:
    operations = simulated(describe(max_new_tokens=9)).operations
    assert {one.repeats for one in operations.operations} == {1, 8}
    assert sum(one.repeats for one in operations.operations) > 8 * len(operations.operations) / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": None}, "generation.max_new_tokens: say how many"),
        ({"cache_implementation": "quantized"}, "quantised keys and values are not simulated"),
        ({"cache_implementation": "static"}, "compiled graphs are not simulated"),
        ({"no_repeat_ngram_size": 3}, "bans n-grams"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation is not simulated"),
        ({"num_return_sequences": 2}, "needs do_sample"),
        ({"num_beans": 2}, "num_beams"),
    ],
    ids=str,
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe(**changes)


def test_more_tokens_than_positions_and_models_that_cannot_generate_are_refused() -> None:
    with pytest.raises(WorkloadError, match="more than the 64 positions of GPT2LMHeadModel"):
        predicted(describe("GPT2LMHeadModel", GPT2, max_new_tokens=34))
    assert predicted(describe("GPT2LMHeadModel", GPT2, max_new_tokens=33)).generation
    with pytest.raises(WorkloadError, match="cannot generate"):
        predicted(describe("BertForSequenceClassification", {"hidden_size": 96, "num_hidden_layers": 1}))
    with pytest.raises(WorkloadError, match="needs mode: generation"):
        Workload.from_mapping({"model": {"id": "gpt2"}, "generation": {"num_beams": 4}})
