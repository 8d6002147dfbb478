"""Labels of real traces compared with a simulated run, where every label is known."""

from __future__ import annotations

from collections import Counter

import pytest
from note_taker import differences, run

from trainatomy.analysis.logits import logits_and_loss
from trainatomy.analysis.memory import lifetimes, purposes
from trainatomy.measurement.traces import breakdown
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin

BERT = {
    "class": "BertForSequenceClassification",
    "config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 2000,
    },
}
LLAMA = {
    "class": "LlamaForCausalLM",
    "config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 2000,
    },
}
T5 = {"class": "T5ForConditionalGeneration", "config": {"d_model": 32, "num_layers": 1, "d_ff": 64, "num_heads": 2}}
RESNET = {"class": "ResNetForImageClassification", "config": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 8, 8]}}


CASES = {
    "bf16": {"model": BERT, "train": {"bf16": True}},
    "fp32": {"model": BERT},
    "checkpointed": {"model": LLAMA, "train": {"bf16": True, "gradient_checkpointing": True}},
    "every second layer": {
        "model": LLAMA,
        "train": {"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_every": 2},
    },
    "reentrant": {
        "model": LLAMA,
        "train": {
            "bf16": True,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    },
    "accumulated": {"model": LLAMA, "train": {"fp16": True, "gradient_accumulation_steps": 2}, "loop": "pytorch"},
    "adafactor": {"model": T5, "train": {"optim": "adafactor", "bf16": True}},
    "convolutions": {"model": RESNET, "train": {"bf16": True}},
    "evaluated": {
        "model": BERT,
        "steps": 2,
        "data": {"compute_metrics": True, "eval_samples": 16},
        "train": {"bf16": True, "eval_strategy": "steps"},
    },
    "inference": {"model": BERT, "mode": "inference", "train": {"bf16": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_measured_trace_has_the_labels_of_a_simulated_one(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    mapping = {"data": {"sequence_length": 32}, **CASES[case]}
    if case == "convolutions":
        del mapping["data"]
    mapping["train"] = {"per_device_train_batch_size": 2, **mapping.get("train", {})}
    simulated, real = run(monkeypatch, mapping)
    wrong = differences(simulated, real)
    assert not wrong, wrong
    ours, theirs = (purposes(trace, lifetimes(trace)) for trace in (simulated, real))
    workspaces_found = [Counter(purpose for purpose in side if "orkspaces" in purpose.line) for side in (ours, theirs)]
    assert workspaces_found[0] == workspaces_found[1]
    assert [one.module for one in real.origins if one.phase == "forward"] == [
        one.module for one in simulated.origins if one.phase == "forward"
    ]


def handwritten_trace() -> AllocationTrace:
    """Return two equal steps, each with a batch before it and a workspace in forward and backward."""
    trace = AllocationTrace()

    def allocate(size: int, phase: str, step: int) -> int:
        trace.events.append(Event("alloc", len(trace.origins), size))
        trace.origins.append(Origin("", "", phase, step))
        return len(trace.origins) - 1

    def mark(name: str, step: int) -> None:
        trace.marks.append(Mark(len(trace.events), name, step))

    mark("loaded", -1)
    for step in (0, 1):
        batch = allocate(100, "other", step - 1)
        mark("step", step)
        mark("forward", step)
        allocate(1000, "forward", step)
        mark("forward end", step)
        allocate(1000, "backward", step)
        temporary = allocate(64, "backward", step)
        trace.events.append(Event("free", temporary, 0))
        mark("backward end", step)
        kept = allocate(8, "other", step)
        trace.events += [Event("free", batch, 0), Event("free", kept, 0)]
        mark("step end", step)
    return trace


def test_workspaces_are_the_first_of_their_size_on_each_thread_that_stay() -> None:
    trace = handwritten_trace()
    breakdown.label_workspaces(trace, lifetimes(trace), "cublas_workspace", 1000)
    assert trace.labels == {1: "cublas_workspace", 2: "cublas_workspace"}


def test_inputs_arrive_between_steps_and_exist_in_forward() -> None:
    trace = handwritten_trace()
    breakdown.label_inputs(trace, lifetimes(trace))
    assert trace.labels == {0: "input", 5: "input"}


def test_a_step_that_repeats_a_followed_one_gets_its_modules_and_marks() -> None:
    trace = handwritten_trace()
    trace.origins[1] = trace.origins[1]._replace(module="layer")
    trace.labels[1] = "weight_copy"
    again = next(mark.event for mark in trace.marks if mark.name == "forward end")
    trace.marks += [Mark(again, "recompute", 0), Mark(again + 1, "recompute end", 0)]
    trace.marks.sort(key=lambda mark: mark.event)
    assert breakdown.attribute_repeated_passes(trace, [0]) == ()
    assert trace.origins[6].module == "layer" and trace.origins[6].step == 1
    assert trace.labels[6] == "weight_copy"
    copied = [mark.event for mark in trace.marks if mark.name.startswith("recompute") and mark.step == 1]
    assert copied == [again + 8, again + 9], "a step has eight events"


def longer(trace: AllocationTrace, number: int, size: int) -> None:
    """Make one allocation of the trace larger."""
    index = next(index for index, event in enumerate(trace.events) if event.allocation == number)
    trace.events[index] = trace.events[index]._replace(bytes=size)


def test_a_longer_batch_is_the_same_pass() -> None:
    trace = handwritten_trace()
    trace.origins[1] = trace.origins[1]._replace(module="layer")
    longer(trace, 6, 2000)
    assert breakdown.attribute_repeated_passes(trace, [0]) == ()
    assert trace.origins[6].module == "layer" and trace.origins[6].step == 1


def test_a_copy_of_a_weight_is_as_large_in_every_pass() -> None:
    trace = handwritten_trace()
    trace.labels[1] = "weight_copy"
    longer(trace, 6, 2000)
    assert breakdown.attribute_repeated_passes(trace, [0]) == (1,)
    assert 6 not in trace.labels


def test_a_step_with_a_unique_pass_is_reported() -> None:
    trace = handwritten_trace()
    begin = next(index for index, event in enumerate(trace.events) if event.allocation == 6)
    trace.origins.append(Origin("", "", "forward", 1))
    trace.events.insert(begin, Event("alloc", len(trace.origins) - 1, 64))
    trace.marks = [mark._replace(event=mark.event + (mark.event > begin)) for mark in trace.marks]
    assert breakdown.attribute_repeated_passes(trace, [0]) == (1,)


def test_an_interrupted_pass_is_labelled_up_to_its_end() -> None:
    trace = handwritten_trace()
    trace.origins[1] = trace.origins[1]._replace(module="layer")
    trace.labels[1] = "weight_copy"
    again = next(index for index, event in enumerate(trace.events) if event.allocation == 6)
    del trace.events[again + 1 :]
    del trace.origins[7:]
    trace.marks = [mark for mark in trace.marks if mark.event <= again]
    assert breakdown.attribute_repeated_passes(trace, [0]) == ()
    assert trace.origins[6].module == "layer" and trace.labels[6] == "weight_copy"


GPT2 = {"class": "GPT2LMHeadModel", "config": {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 2000}}
PRETRAINING = {**BERT, "class": "BertForPreTraining"}


@pytest.mark.parametrize(
    "mapping",
    [
        {"model": LLAMA, "train": {"bf16": True, "gradient_checkpointing": True}},
        {"model": {**LLAMA, "lora": {"r": 4}, "dtype": "bfloat16"}},
        {"model": T5},
        {"model": PRETRAINING},
        {"model": GPT2, "loop": "pytorch", "train": {"gradient_accumulation_steps": 2}},
        {"model": GPT2, "train": {"label_smoothing_factor": 0.1}},
        {"model": GPT2, "mode": "inference"},
    ],
    ids=["checkpointed", "adapters", "encoder-decoder", "two heads", "accumulated", "smoothed", "inference"],
)
def test_a_measured_trace_has_the_logits_of_a_simulated_one(
    monkeypatch: pytest.MonkeyPatch, mapping: dict[str, object]
) -> None:
    train = {"per_device_train_batch_size": 2, **mapping.get("train", {})}  # type: ignore[dict-item]
    simulated, real = run(monkeypatch, {**mapping, "data": {"sequence_length": 24}, "train": train})
    assert logits_and_loss(simulated) == logits_and_loss(real) != set()
