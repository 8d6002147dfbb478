"""Evaluations in a simulated training: what they gather, what repeats, and what the step after them does."""

from __future__ import annotations

from typing import Any

import pytest
from executed import predicted, simulated

from trainatomy.errors import WorkloadError
from trainatomy.simulator.evaluation import RepeatedBatches
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

VOCABULARY = 4096
CONFIG = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}


def describe(data: dict[str, Any] | None = None, steps: int | None = None, **train: Any) -> Workload:
    """Return a training of a tiny GPT-2 that evaluates batches of 16."""
    settings = {"eval_strategy": "steps", "per_device_train_batch_size": 2, "per_device_eval_batch_size": 16}
    return Workload.from_mapping(
        {
            "model": {"class": "GPT2LMHeadModel", "config": CONFIG},
            "data": {"sequence_length": 64, **(data or {})},
            "train": {**settings, **train},
            **({} if steps is None else {"steps": steps}),
        }
    )


def run(workload: Workload) -> Simulation:
    """Simulate a workload that is simulated otherwise elsewhere in the same test."""
    return simulate(workload, workload.resolve_gpu())


def gathered(workload: Workload) -> list[int]:
    """Return the sizes of the tensors that evaluation joins outputs in."""
    trace = simulated(workload).trace
    return [
        event.bytes
        for event in trace.events
        if event.action == "alloc" and trace.origins[event.allocation].operation == "aten::cat"
        and trace.origins[event.allocation].phase == "evaluation" and event.bytes > 1 << 20
    ]  # fmt: skip


LOGITS = 16 * 64 * VOCABULARY * 4


def test_logits_are_gathered_in_growing_tensors_if_metrics_are_computed() -> None:
    assert gathered(describe({"compute_metrics": True, "eval_samples": 64})) == [2 * LOGITS, 3 * LOGITS, 4 * LOGITS]
    assert gathered(describe({"eval_samples": 64})) == []
    assert gathered(describe({"compute_metrics": True, "eval_samples": 64}, prediction_loss_only=True)) == []


def test_accumulation_moves_outputs_to_the_host() -> None:
    workload = describe({"compute_metrics": True}, eval_accumulation_steps=2)
    assert workload.eval_samples == 4 * 16
    assert gathered(workload) == [2 * LOGITS, 2 * LOGITS]
    simulation = simulated(workload)
    assert simulation.evaluation is not None
    begin, end = simulation.evaluation.events.start, simulation.evaluation.events.stop
    assert [event.action for event in simulation.trace.events[begin:end]].count("empty_cache") == 2


def test_copied_batches_are_what_execution_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = describe({"compute_metrics": True, "eval_samples": 16 * 6 + 4}, bf16=True)
    copied = run(workload)
    copies = 0
    repeat = RepeatedBatches.repeat

    def executed(self: RepeatedBatches, batch: Any) -> Any:
        nonlocal copies
        with monkeypatch.context() as patch:
            patch.setattr(self._calls, "write_again", lambda *arguments: None)
            return repeat(self, batch)

    def counted(self: RepeatedBatches, batch: Any) -> Any:
        nonlocal copies
        found = repeat(self, batch)
        copies += found is not None
        return found

    monkeypatch.setattr(RepeatedBatches, "repeat", counted)
    run(workload)
    assert copies == 4
    monkeypatch.setattr(RepeatedBatches, "repeat", executed)
    whole = run(workload)
    assert whole.trace == copied.trace
    assert whole.evaluation == copied.evaluation and whole.operations == copied.operations


def test_the_step_after_an_evaluation_is_that_of_a_training_without() -> None:
    plain, evaluated = simulated(describe(steps=3, eval_strategy="no")), simulated(describe(steps=3))
    assert evaluated.evaluation is not None and plain.evaluation is None
    assert evaluated.operations.calls == plain.operations.calls
    assert len(evaluated.operations.operations) == len(plain.operations.operations)
    phases = {evaluated.trace.origins[event.allocation].phase for event in _within(evaluated)}
    assert phases == {"evaluation"}


def _within(simulation: Simulation) -> list[Any]:
    assert simulation.evaluation is not None
    events = simulation.evaluation.events
    return [event for event in simulation.trace.events[events.start : events.stop] if event.action == "alloc"]


def test_accumulated_gradients_are_copied_again_after_an_evaluation() -> None:
    plain = simulated(describe(steps=3, eval_strategy="no", gradient_accumulation_steps=6))
    evaluated = simulated(describe(steps=3, gradient_accumulation_steps=6))
    assert evaluated.operations.calls == plain.operations.calls


def test_evaluation_on_start_comes_before_the_first_step() -> None:
    marks = simulated(describe(eval_strategy="no", eval_on_start=True)).trace.marks
    names = [mark.name for mark in marks]
    assert names.count("evaluation") == 1 and names.index("evaluation") < names.index("step")


def test_the_bill_says_what_an_evaluation_adds() -> None:
    prediction = predicted(describe({"compute_metrics": True, "eval_samples": 64}))
    found, memory = prediction.evaluation, prediction.memory
    assert found is not None and found.batches == 4 and found.seconds
    assert memory.peak.phase == "evaluation" and memory.components["gathered_outputs"] >= 4 * LOGITS
    assert found.own_allocated_bytes == found.allocated_after_bytes == memory.peak_allocated_bytes
    assert found.added_reserved_bytes > 4 * LOGITS
    plain = predicted(describe(eval_strategy="no"))
    assert plain.evaluation is None and plain.memory.peak_allocated_bytes == found.allocated_before_bytes


def test_what_is_gathered_must_be_known() -> None:
    with pytest.raises(WorkloadError, match=r"data\.eval_samples: evaluation keeps the outputs of all samples"):
        describe({"compute_metrics": True})
    with pytest.raises(WorkloadError, match=r"data\.compute_metrics: batch_eval_metrics calls it"):
        describe({"compute_metrics": True}, batch_eval_metrics=True)
    with pytest.raises(WorkloadError, match=r"loop: pytorch` has no evaluation"):
        Workload.from_mapping({"model": {"id": "gpt2"}, "loop": "pytorch", "train": {"eval_strategy": "steps"}})


def test_the_users_functions_reduce_what_is_gathered(tmp_path: Any) -> None:
    file = tmp_path / "metrics.py"
    file.write_text(
        "def best(logits, labels):\n    return logits.argmax(-1)\n"
        "def metrics(predictions, compute_result):\n"
        "    wrong = predictions.predictions.argmax(-1) != predictions.label_ids\n"
        "    return {'wrong': wrong.float().mean().item()}\n"
    )
    reduced = describe({"compute_metrics": True, "eval_samples": 64, "preprocess_logits_for_metrics": f"{file}:best"})
    assert gathered(reduced) == []
    assert predicted(reduced).memory.components["gathered_outputs"] < 2 * LOGITS
    batchwise = simulated(describe({"compute_metrics": f"{file}:metrics"}, batch_eval_metrics=True))
    assert any(origin.operation == "aten::ne" and origin.phase == "evaluation" for origin in batchwise.trace.origins)


def test_predict_with_generate_generates_all_tokens_of_every_batch() -> None:
    config = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
    described = {
        "model": {"class": "T5ForConditionalGeneration", "config": config},
        "data": {"sequence_length": 16, "compute_metrics": True, "eval_samples": 12},
        "train": {"eval_strategy": "steps", "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4},
        "steps": 2,
    }
    plain = simulated(Workload.from_mapping(described))
    made = simulated(
        Workload.from_mapping(described).replace(
            {"train.predict_with_generate": True, "train.generation_max_length": 9}
        )
    )
    decodes = [
        origin
        for origin in (made.trace.origins[event.allocation] for event in _within(made))
        if origin.operation == "aten::argmax"
    ]
    assert len(decodes) == 3 * 8  # three batches, eight tokens after the decoder's first
    assert len(_within(made)) > 5 * len(_within(plain))
    with pytest.raises(WorkloadError, match=r"needs data\.compute_metrics"):
        Workload.from_mapping(described | {"data": {}}).replace("train.predict_with_generate", True)


def _calls(simulation: Simulation, name: str) -> list[dict[str, str]]:
    """Return the numbers of the calls of an operation in an evaluation, as often as it runs."""
    assert simulation.evaluation is not None
    operations = simulation.evaluation.operations
    calls = [operations.calls[one.call] for one in operations.operations]
    return [dict(call.numbers) for call in calls if call.name == name]


def test_what_the_host_joins_and_converts_is_read_and_written_once() -> None:
    joined = _calls(simulated(describe({"compute_metrics": True}, eval_accumulation_steps=2)), "numpy::concatenate")
    assert [int(one["bytes"]) for one in joined if int(one["bytes"]) > LOGITS] == [2 * 4 * LOGITS]
    assert _calls(simulated(describe({"compute_metrics": True, "eval_samples": 64})), "numpy::concatenate") == []
    kept = {"compute_metrics": True, "eval_samples": 32}
    model = {"class": "GPT2LMHeadModel", "config": CONFIG, "dtype": "bfloat16"}
    halves = describe(kept).replace("model", model)
    converted = _calls(simulated(halves), "numpy::convert")
    assert max(int(one["bytes"]) for one in converted) == 2 * 3 * LOGITS // 2


def test_time_is_that_of_new_host_memory_where_outputs_are_large() -> None:
    wide = {**CONFIG, "vocab_size": 65_536}
    model = {"class": "GPT2LMHeadModel", "config": wide}
    large = describe({"compute_metrics": True, "eval_samples": 64}, bf16=True).replace({"model": model, "gpu": "h200"})
    losses = large.replace("train.prediction_loss_only", True)
    found, without = predicted(large).evaluation, predicted(losses).evaluation
    assert found is not None and without is not None and found.seconds and without.seconds
    size = 64 * 64 * 65_536 * 4
    assert found.seconds - without.seconds == pytest.approx(size / 1.6e9, rel=0.25)


def test_the_first_evaluation_plans_attention_for_new_shapes() -> None:
    described = describe({"compute_metrics": True, "eval_samples": 36}, bf16=True).replace("gpu", "h200")
    found = predicted(described).evaluation
    assert found is not None and found.first_extra_seconds == pytest.approx(0.012 + 2 * 0.028)  # batches of 16 and of 4
    whole = predicted(described.replace("data.eval_samples", 32)).evaluation
    assert whole is not None and whole.first_extra_seconds == pytest.approx(0.012 + 0.028)
    assert whole.first_on_machine_seconds == 0.45
    plain = predicted(described.replace("model.attn_implementation", "eager")).evaluation
    assert plain is not None and plain.first_extra_seconds == 0.012 and plain.first_on_machine_seconds == 0.0


def test_the_first_evaluation_plans_convolutions_for_a_new_batch_size() -> None:
    config = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128], "image_size": 64}
    mapping = {
        "model": {"class": "ConvNextForImageClassification", "config": config},
        "data": {"eval_samples": 16},
        "train": {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "eval_strategy": "steps"},
        "gpu": "h200",
    }
    found = predicted(Workload.from_mapping({**mapping, "train": {**mapping["train"], "bf16": True}})).evaluation
    # four depthwise convolutions, the stem and three between stages
    assert found is not None and found.first_extra_seconds == pytest.approx(0.012 + 4 * 0.103 + 4 * 0.0013)
    full = predicted(Workload.from_mapping(mapping)).evaluation
    assert full is not None and full.first_extra_seconds == pytest.approx(0.012 + 8 * 0.0013)
    known = predicted(Workload.from_mapping(mapping).replace("train.per_device_train_batch_size", 8)).evaluation
    assert known is not None and known.first_extra_seconds == 0.012
