"""TRL's trainers without a GPU: what their losses, reference models and generation hold."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated

from trainatomy import predict
from trainatomy.allocator.replay import replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

pytest.importorskip("trl")
pytest.importorskip("datasets")

LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
TILE = 32768
"""Logits of a token that TRL computes at a time."""


REWARD = {"class": "LlamaForSequenceClassification", "config": {**LLAMA, "num_labels": 1}}


def describe(loop: str, lora: bool = False, **sections: Any) -> Workload:
    base = REWARD if loop == "reward" else {"class": "LlamaForCausalLM", "config": LLAMA}
    model = {**sections.pop("model", base), **({"lora": {"r": 4}} if lora else {})}
    data = {"sequence_length": 32, **sections.pop("data", {})}
    train = {"per_device_train_batch_size": 2, **sections.pop("train", {})}
    return Workload.from_mapping({"model": model, "loop": loop, "data": data, "train": train, **sections})


def run(loop: str, lora: bool = False, **sections: Any) -> Simulation:
    return simulated(describe(loop, lora, **sections))


def sizes(simulation: Simulation) -> set[int]:
    return {event.bytes for event in simulation.trace.events if event.action == "alloc"}


def bytes_labelled(simulation: Simulation, label: str) -> int:
    size = {event.allocation: event.bytes for event in simulation.trace.events if event.action == "alloc"}
    return sum(size[number] for number, found in simulation.trace.labels.items() if found == label)


@pytest.mark.parametrize(("prompt", "tokens"), [(None, 31), (10, 22)])
def test_only_tokens_of_the_loss_have_logits(prompt: int | None, tokens: int) -> None:
    simulation = run("sft", data={} if prompt is None else {"prompt_length": prompt})
    assert 2 * tokens * TILE * 2 in sizes(simulation)  # bfloat16


def test_a_class_of_optimizers_is_made_of_the_shards_of_fsdp() -> None:
    """As with the Trainer, which takes no optimizer that was made before the model is sharded."""
    train = {"optim": "torch.optim.SGD", "optim_args": "momentum=0.9", "fsdp": True, "fsdp_config": {"version": 2}}
    simulation = run("sft", train=train, parallel={"gpus": 2})
    momentum = bytes_labelled(simulation, "optimizer_state")
    assert momentum == pytest.approx(4 * simulation.parameters / 2, rel=0.05)  # float32, blocks of 512 bytes


@pytest.mark.parametrize(("loop", "tokens"), [("sft", 2 * 31), ("dpo", 2 * 2 * 22)])
def test_the_loss_of_a_compiled_model_runs_its_kernels_on_the_same_tiles(loop: str, tokens: int) -> None:
    """Of preferences the tokens after the prompt count, which Python selects between two graphs."""
    pytest.importorskip("triton")
    data = {"prompt_length": 10} if loop == "dpo" else {}
    eager, compiled = (
        run(loop, data=data, train={"torch_compile": compiled, "gradient_checkpointing": False})
        for compiled in (False, True)
    )
    assert tiles(compiled) == tiles(eager) == {(tokens, LLAMA["vocab_size"])}
    assert any("Dynamo breaks" in note for note in compiled.notes)


def tiles(simulation: Simulation) -> set[tuple[int, ...]]:
    return {call.inputs[0].shape for call in simulation.operations.calls if call.name == "triton::kernel"}


def test_packs_hold_as_many_samples_as_fit() -> None:
    simulation = run("sft", trl={"packing": True, "max_length": 100})
    assert 2 * 3 * 31 * TILE * 2 in sizes(simulation)  # no token follows the last one of a sample


@pytest.mark.usefixtures("kept_workspaces")
@pytest.mark.parametrize(("settings", "samples"), [({}, 3), ({"eval_packing": False}, 1)])
def test_evaluation_packs_as_the_training_unless_it_is_told_otherwise(settings: dict[str, bool], samples: int) -> None:
    train = {"eval_strategy": "steps", "per_device_eval_batch_size": 8}
    simulation = run("sft", trl={"packing": True, "max_length": 100, **settings}, train=train)
    assert simulation.evaluation is not None and simulation.evaluation.batches == 2
    evaluated = [simulation.trace.events[number].bytes for number in simulation.evaluation.events]
    assert max(evaluated) == 8 * samples * 31 * TILE * 2


@pytest.mark.parametrize(("loop", "answers"), [("dpo", 2), ("kto", 1)])
def test_the_reference_model_is_held_unless_an_adapter_or_precomputed_values_replace_it(
    loop: str, answers: int
) -> None:
    data = {"prompt_length": 10}
    plain = run(loop, data=data)
    assert bytes_labelled(plain, "reference_weight") == bytes_labelled(plain, "weight") + bytes_labelled(
        plain, "buffer"
    )
    for simulation in (run(loop, lora=True, data=data), run(loop, data=data, trl={"precompute_ref_log_probs": True})):
        assert bytes_labelled(simulation, "reference_weight") == 0
        assert answers * 2 * 22 * TILE * 2 in sizes(simulation)  # the answers to two prompts


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 4),  # of two models, each with the answer and with the one beside it
        ({"loss_type": "apo_zero_unpaired"}, 2),
        ({"precompute_ref_log_probs": True}, 2),
    ],
)
def test_kto_also_scores_the_answer_to_another_prompt(settings: dict[str, Any], passes: int) -> None:
    simulation = run("kto", data={"prompt_length": 10}, trl=settings)
    first = next(mark.event for mark in simulation.trace.marks if mark.name == "step")
    trained = [event.bytes for event in simulation.trace.events[first:] if event.action == "alloc"]
    assert trained.count(2 * 22 * TILE * 2) == simulation.steps * (passes + 1)  # and one in backward
    assert any("half of the answers" in note for note in simulation.notes)


def test_a_reward_model_is_trained_as_a_classifier_of_twice_as_many_sequences() -> None:
    settings = {"bf16": True, "gradient_checkpointing": True}
    pairs = run("reward", train=settings)
    sequences = run(
        "trainer", model=REWARD, data={"attention_mask": True}, train={**settings, "per_device_train_batch_size": 4}
    )
    assert bytes_labelled(pairs, "weight") == bytes_labelled(sequences, "weight")
    peaks = [
        replay(one.trace, AllocatorSettings(), device_bytes=2**37).peak_allocated_bytes for one in (pairs, sequences)
    ]
    assert peaks[0] == pytest.approx(peaks[1], abs=8 * 512)  # the losses differ in a few numbers for each pair
    assert pairs.tokens_per_sample == 2 * 32
    assert sequences.tokens_per_sample == 32


def test_reward_models_are_classifiers_with_one_label_and_samples_that_trl_keeps() -> None:
    with pytest.raises(WorkloadError, match=r"LlamaForCausalLM is none: set model\.class: AutoModelForSequence"):
        run("reward", model={"class": "LlamaForCausalLM", "config": LLAMA})
    with pytest.raises(WorkloadError, match="trains a classifier with one label"):
        run("reward", model={**REWARD, "config": {**LLAMA, "num_labels": 2}})
    with pytest.raises(WorkloadError, match=r"reward leaves out samples of more than 16 tokens"):
        run("reward", trl={"max_length": 16})


def test_the_logits_of_each_batch_are_those_of_its_tokens() -> None:
    lengths = [30, 12, 25, 25, 7, 31]
    train = {"train_sampling_strategy": "sequential"}
    workload = describe("sft", data={"lengths": {"histogram": dict.fromkeys(sorted(set(lengths)), 1)}}, train=train)
    simulation = simulate(workload, workload.resolve_gpu(), steps=2)
    first, second = (7 - 1) + (12 - 1), (25 - 1) + (30 - 1)
    assert {first * TILE * 2, second * TILE * 2} <= sizes(simulation)


def test_the_loss_is_not_taken_as_infinite() -> None:
    """Otherwise the Trainer would add a mean of earlier losses in its place (``logging_nan_inf_filter``)."""
    trace = run("sft").trace
    ends = [mark.event for mark in trace.marks if mark.name == "backward end"]
    starts = [mark.event for mark in trace.marks if mark.name == "optimizer"]
    between = [event for end, start in zip(ends, starts, strict=True) for event in trace.events[end:start]]
    made = {trace.origins[event.allocation].operation for event in between if event.action == "alloc"}
    assert "aten::isnan" in made or "aten::ne" in made
    assert "aten::div" not in made


def test_a_batch_of_your_own_is_refused() -> None:
    with pytest.raises(WorkloadError, match="loop: sft takes no batch of your own"):
        predict(describe("sft", data={"sequence_length": None}), batch=lambda size: {})


def test_what_trl_refuses_is_no_bug_of_ours() -> None:
    with pytest.raises(SimulationError, match=r"Invalid `loss_type` sigmoid[^$]*TRL refuses these settings"):
        run("sft", trl={"loss_type": "sigmoid"})


def test_an_adapter_of_a_training_has_no_copy() -> None:
    assert run("dpo", lora=True, data={"prompt_length": 10}).parameters == run("sft", lora=True).parameters


@pytest.mark.parametrize(("loop", "data"), [("sft", {}), ("dpo", {"prompt_length": 10})])
def test_trainers_evaluate_save_and_load_the_best_model(loop: str, data: dict[str, Any]) -> None:
    train = {"eval_strategy": "steps", "per_device_eval_batch_size": 8, "load_best_model_at_end": True}
    simulation = run(loop, data=data, train={**train, "save_strategy": "steps"})
    assert simulation.evaluation is not None and simulation.evaluation.batches == 2
    evaluated = [simulation.trace.events[number].bytes for number in simulation.evaluation.events]
    tokens = {"sft": 31, "dpo": 2 * 22}[loop]
    assert 8 * tokens * TILE * 2 in evaluated
    assert simulation.saving is not None and simulation.saving.files["model.safetensors"] > 0
    assert list(simulation.restored) == ["best"]


def test_grpo_saves_and_continues() -> None:
    settings = {"num_generations": 2, "max_completion_length": 3}
    simulation = run("grpo", trl=settings, train={"save_strategy": "steps", "resume_from_checkpoint": True})
    assert simulation.saving is not None and simulation.saving.files["optimizer.pt"] > 0
    assert list(simulation.restored) == ["resume"]


def test_grpo_generates_all_tokens_of_a_completion() -> None:
    simulation = run("grpo", trl={"num_generations": 2, "max_completion_length": 5})
    marks = [mark.name for mark in simulation.trace.marks]
    assert marks.count("token") == simulation.steps * 4
    assert bytes_labelled(simulation, "key_value_cache") > 0
    assert 2 * 5 * TILE * 2 in sizes(simulation)
    assert any("every completion gets all its tokens" in note for note in simulation.notes)
    assert {one.repeats for one in simulation.operations.operations if one.generated} == {4}
    assert {one.repeats for one in simulation.operations.operations if not one.generated} == {1}


def test_a_step_of_grpo_that_does_not_generate_is_executed_where_there_is_one() -> None:
    settings = {"num_generations": 2, "max_completion_length": 5}
    assert run("grpo", trl=settings).operations_between is None
    found = run("grpo", trl={**settings, "num_iterations": 3})
    assert found.operations_between is not None
    counts = [sum(one.repeats for one in each.operations) for each in (found.operations, found.operations_between)]
    assert counts[0] > 1.5 * counts[1] > 0
    assert {one.phase for one in found.operations_between.operations} >= {"forward", "backward", "optimizer"}


def test_grpo_has_a_reference_model_only_with_a_divergence() -> None:
    settings = {"num_generations": 2, "max_completion_length": 5}
    assert bytes_labelled(run("grpo", trl=settings), "reference_weight") == 0
    assert bytes_labelled(run("grpo", trl={**settings, "beta": 0.1}), "reference_weight") > 0


@pytest.mark.parametrize(
    ("trl", "tokens"),
    [
        ({}, 32),
        ({"max_length": 20}, 20),
        ({"packing": True, "max_length": 80}, 64),
        ({"packing": True, "max_length": 20}, 20),
        ({"packing": True, "max_length": 80, "packing_strategy": "wrapped"}, 80),
    ],
)
def test_tokens_are_those_of_a_row_that_trl_makes(trl: dict[str, Any], tokens: int) -> None:
    """The embedding looks up each token of the batch of two rows."""
    simulation = run("sft", trl=trl)
    found = simulation.operations
    looked_up = next(call for call in found.calls if call.name == "aten::embedding")
    assert looked_up.outputs[0].elements == 2 * tokens * LLAMA["hidden_size"]
    assert simulation.tokens_per_sample == tokens


def test_samples_that_trl_cuts_are_noted() -> None:
    notes = run("sft", trl={"max_length": 16}).notes
    assert any("TRL cuts samples of 32 tokens to 16" in note for note in notes)


@pytest.mark.parametrize(("loop", "does"), [("sft", "cuts"), ("reward", "leaves out")])
def test_samples_of_different_lengths_that_trl_cuts_or_leaves_out_are_noted(loop: str, does: str) -> None:
    notes = run(loop, data={"sequence_length": None, "lengths": [30, 12, 25, 25]}, trl={"max_length": 25}).notes
    assert f"TRL {does} 1 of 4 samples that have more than 25 tokens (trl.max_length)" in notes


def test_a_setting_of_another_trainer_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"trl\.num_generations: SFTConfig has no such setting"):
        run("sft", trl={"num_generations": 2})


def test_models_that_are_no_language_models_are_refused() -> None:
    workload = Workload.from_mapping({"model": {"class": "BertForSequenceClassification"}, "loop": "sft"})
    with pytest.raises(WorkloadError, match="loop: sft trains causal language models"):
        simulate(workload, workload.resolve_gpu())
