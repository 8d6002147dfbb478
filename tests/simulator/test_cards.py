"""One execution serves several GPUs: what it says of each is what executing on it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from trainatomy.api.elsewhere import predict_row
from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Processor, Scratch
from trainatomy.operators.allocation.workspaces import WorkspaceTracker
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.prediction import Prediction
from trainatomy.runs.predicting import predict_rows
from trainatomy.simulator import simulate as simulation
from trainatomy.simulator.cards import Card, CardBytes, Cards, others_like
from trainatomy.simulator.cudnn import chosen_alike
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import ExecutionOptions, execute, simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

GPUS = (
    *("t4", "l4", "a100-40gb", "a2", "rtx-3090", "h100-pcie", "b200", "rtx-5090"),
    *("rtx-2080-ti", "a100-80gb", "rtx-3060", "rtx-4090", "h200"),
)
TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "BERT": {
        "model": {"class": "BertForSequenceClassification", "config": {"num_hidden_layers": 2}},
        "data": {"sequence_length": 512},
        "train": {"per_device_train_batch_size": 8, "fp16": True},
    },
    "BERT in fp32": {
        "model": {"class": "BertForSequenceClassification", "config": {"num_hidden_layers": 2}},
        "data": {"sequence_length": 512},
        "train": {"per_device_train_batch_size": 8},
    },
    "larger than some GPUs": {
        "model": {"class": "BertForSequenceClassification", "config": {"num_hidden_layers": 2}},
        "data": {"sequence_length": 512},
        "train": {"per_device_train_batch_size": 512, "fp16": True},
    },
    "sums that fewer blocks share": {
        "model": {"class": "BertForSequenceClassification", "config": TEXT},
        "data": {"sequence_length": 512},
        "train": {"per_device_train_batch_size": 64, "fp16": True},
    },
    "Llama with LoRA": {
        "model": {"class": "LlamaForCausalLM", "config": {**TEXT, "num_key_value_heads": 1}, "lora": {"r": 4}},
        "data": {"sequence_length": 512},
        "train": {
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 3,
            "gradient_checkpointing": True,
        },
    },
    "Llama with LoRA in bf16": {
        "model": {"class": "LlamaForCausalLM", "config": {**TEXT, "num_key_value_heads": 1}, "lora": {"r": 4}},
        "data": {"sequence_length": 512},
        "train": {"per_device_train_batch_size": 8, "bf16": True},
    },
    "ResNet": {
        "model": {
            "class": "ResNetForImageClassification",
            "config": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 10},
        },
        "train": {"per_device_train_batch_size": 64, "fp16": True},
        "loop": "pytorch",
    },
    "8-bit optimizer": {
        "model": {"class": "GPT2LMHeadModel", "config": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 8000}},
        "data": {"sequence_length": 128},
        "train": {"per_device_train_batch_size": 64, "optim": "adamw_bnb_8bit"},
    },
    "Liger": {
        "model": {"class": "LlamaForCausalLM", "config": TEXT},
        "data": {"sequence_length": 128},
        "train": {"per_device_train_batch_size": 2, "use_liger_kernel": True},
    },
}
NEEDS = {
    "8-bit optimizer": "bitsandbytes",
    "Liger": "liger_kernel",
    "Llama with LoRA": "peft",
    "Llama with LoRA in bf16": "peft",
}


SERVED = {
    **dict.fromkeys(WORKLOADS, (13, 13, 13)),
    "BERT": (11, 2, 11),  # fused attention before 8.0 is another one
    "larger than some GPUs": (9, 1, 2),
    "sums that fewer blocks share": (4, 2, 7),
    "Llama with LoRA in bf16": (3, 2, 6),  # cuDNN's attention on 9.0 and 10.0, none in bf16 before 8.0
    "Liger": (1, 1, 1),  # its launcher of kernels asks how many multiprocessors there are
}
"""GPUs that executions on an H200, a T4 and an RTX 3060 serve."""
EXECUTED = {
    **dict.fromkeys(WORKLOADS, 1),
    "BERT": 2,
    "larger than some GPUs": 3,
    "sums that fewer blocks share": 3,
    "Llama with LoRA in bf16": 4,
    "Liger": 8,
}
"""Executions that the first eight GPUs need."""


def described(name: str, gpu: str = "h200") -> Workload:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    return Workload.from_mapping({**WORKLOADS[name], "gpu": gpu})


def executions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each GPU on which a training is executed from now on."""
    found: list[str] = []
    run = simulation._execute

    def noted(workload: Workload, *rest: Any) -> Any:
        found.append(workload.resolve_gpu().id)
        return run(workload, *rest)

    monkeypatch.setattr(simulation, "_execute", noted)
    return found


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_execution_says_of_other_gpus_what_executing_there_says(name: str) -> None:
    workload = described(name)
    gpus = [find_gpu(each) for each in GPUS]
    expected: dict[str, Simulation] = {}
    counts: list[int] = []
    for first in ("h200", "t4", "rtx-3060"):
        execution = execute(workload.replace("gpu", first), find_gpu(first), ExecutionOptions(others=gpus))
        counts.append(0)
        for gpu in gpus:
            there = workload.replace("gpu", gpu.id)
            found = execution.on(there, gpu)
            if found is None:
                continue
            counts[-1] += 1
            if gpu.id not in expected:
                expected[gpu.id] = simulate(there, gpu)
            assert found.trace.events == expected[gpu.id].trace.events
            assert not any(isinstance(event.bytes, CardBytes) for event in found.trace.events)
            assert found == expected[gpu.id]
    assert tuple(counts) == SERVED[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_predictions_side_by_side_are_those_of_each_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predict: Callable[[Workload], Prediction] = partial(predict_row, PredictRequest(timeline=True))
    workloads = [described(name, gpu) for gpu in GPUS[:8]]
    alone = [predict(each) for each in workloads]
    executed = executions(monkeypatch)
    beside = predict_rows(predict, workloads)
    assert [_timeless(each) for each in beside] == [_timeless(each) for each in alone]
    assert len(executed) == EXECUTED[name]
    if name == "larger than some GPUs":
        assert {_timeless(each).fits for each in beside} == {True, False}


def _timeless(prediction: Any) -> Prediction:
    assert isinstance(prediction, Prediction)
    return replace(prediction, seconds_taken=0.0)


def test_sizes_of_buffers_differ_between_gpus() -> None:
    execution = execute(described("BERT", "l4"), find_gpu("l4"), ExecutionOptions(others=[find_gpu("rtx-4090")]))
    found = [execution.on(described("BERT", gpu), find_gpu(gpu)) for gpu in ("l4", "rtx-4090", "a10")]
    assert found[0] is not None and found[1] is not None and found[2] is None
    assert found[0].trace.events != found[1].trace.events


def test_an_allocator_does_not_change_what_is_executed() -> None:
    workload = described("BERT", "l4").replace("allocator", "expandable_segments:True")
    execution = execute(described("BERT", "l4"), find_gpu("l4"))
    assert execution.on(workload, find_gpu("l4")) == simulate(workload, find_gpu("l4"))


def process_on(name: str, *others: str, **how: Any) -> SimulatedProcess:
    gpu = find_gpu(name)
    processor = Processor(gpu.capability, gpu.multiprocessors, (2, 11), l2_bytes=gpu.l2_bytes)
    return SimulatedProcess(
        gpu.device_name,
        gpu.memory_bytes,
        processor,
        others=others_like(gpu, processor, list(map(find_gpu, others))),
        **how,
    )


QUESTIONS: dict[str, tuple[Callable[[], object], set[str]]] = {
    "nothing": (lambda: None, {"a10", "rtx-3060", "rtx-a5000", "h200", "t4"}),
    "capability": (lambda: torch.cuda.get_device_capability(), {"a10", "rtx-3060", "rtx-a5000"}),
    "major": (lambda: torch.cuda.get_device_properties(0).major, {"a10", "rtx-3060", "rtx-a5000"}),
    "bfloat16": (
        lambda: torch.cuda.is_bf16_supported(including_emulation=False),
        {"a10", "rtx-3060", "rtx-a5000", "h200"},
    ),
    "threads": (
        lambda: torch.cuda.get_device_properties(0).max_threads_per_multi_processor,
        {"a10", "rtx-3060", "rtx-a5000"},
    ),
    "memory": (lambda: torch.cuda.get_device_properties(0).total_memory, set()),
    "multiprocessors": (lambda: torch.cuda.get_device_properties(0).multi_processor_count, set()),
    "name": (lambda: torch.cuda.get_device_name(), set()),
    "allocated": (lambda: torch.cuda.memory_allocated(), set()),
    "free": (lambda: torch.cuda.mem_get_info(), set()),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_gpus_that_differ_in_what_is_asked_are_not_served(question: str) -> None:
    process = process_on("rtx-3090", "a10", "rtx-3060", "rtx-a5000", "h200", "t4")
    ask, left = QUESTIONS[question]
    with process.open():
        ask()
    assert {card.name for card in process.cards.others} == {find_gpu(each).device_name for each in left}


def test_a_gpu_that_answers_the_same_is_served_further() -> None:
    process = process_on("a10", "a10g", "rtx-3090")
    with process.open():
        assert torch.cuda.get_device_properties(0).total_memory == find_gpu("a10g").memory_bytes
    assert [card.name for card in process.cards.others] == [find_gpu("a10g").device_name]


def cards() -> Cards:
    own, processor = Card("one", 1, (8, 6), 10, None), Processor((8, 6), 10, (2, 11))
    return Cards(
        own, processor, {Card(f"{n}", 1, (8, 6), n, None): replace(processor, multiprocessors=n) for n in (10, 20, 30)}
    )


def call_on(processor: Processor) -> KernelCall:
    return KernelCall(torch.ops.aten.relu.default, (), {}, (), processor)


def test_a_rule_plans_for_every_gpu() -> None:
    def rule(call: KernelCall) -> Plan:
        return [Scratch(call.processor.multiprocessors * 4, "sums"), Free("sums"), Out(0), Scratch(8, "fixed")]

    found = cards()
    plan = found.plan(rule, call_on(found.processor))
    assert plan == [Scratch(40, "sums"), Free("sums"), Out(0), Scratch(8, "fixed")]
    sums = plan[0]
    assert isinstance(sums, Scratch) and isinstance(sums.bytes, CardBytes)
    assert {card.name: size for card, size in sums.bytes.elsewhere.items()} == {"20": 80, "30": 120}
    assert len(found.others) == 3


@pytest.mark.parametrize(
    "rule",
    [
        lambda call: [Scratch(4, "sums")] if call.processor.multiprocessors < 30 else [],
        lambda call: [Scratch(4 if call.processor.multiprocessors < 30 else 0, "sums")],
        lambda call: [Scratch(4, "sums" if call.processor.multiprocessors < 30 else "others")],
    ],
    ids=("fewer", "empty", "others"),
)
def test_gpus_with_other_buffers_are_not_served(rule: Callable[[KernelCall], Plan]) -> None:
    found = cards()
    assert found.plan(rule, call_on(found.processor)) == [Scratch(4, "sums")]
    assert {card.name for card in found.others} == {"10", "20"}


def test_a_rule_that_reads_nothing_is_asked_once() -> None:
    asked: list[Any] = []

    def rule(call: KernelCall) -> Plan:
        asked.append(call.processor.capability)
        return [Scratch(4)]

    found = cards()
    assert found.plan(rule, call_on(found.processor)) == [Scratch(4)] and len(asked) == 1


def test_gpus_are_asked_for_what_their_capability_decides() -> None:
    found = cards()
    t4 = Card("t4", 1, (7, 5), 10, None)
    found.others[t4] = Processor((7, 5), 10, (2, 11))
    assert found.size(lambda processor: 8 if processor.capability < (8, 0) else 4) == 4
    assert found.decide(lambda processor: processor.capability >= (7, 0)) and t4 in found.others
    assert found.decide(lambda processor: processor.capability >= (8, 0)) and t4 not in found.others
    assert len(found.others) == 3


def test_a_gpu_that_cannot_answer_is_not_served() -> None:
    def refuse(processor: Processor) -> int:
        if processor.multiprocessors == 30:
            raise SimulationError("too many")
        return 1

    found = cards()
    assert found.size(refuse) == 1
    assert {card.name for card in found.others} == {"10", "20"}


def test_workspaces_of_libraries_differ_between_gpus() -> None:
    process = process_on("a10", "h200", workspaces=WorkspaceTracker)
    with process.open():
        first = torch.ones((64, 64), device="cuda")
        first @ first
    sizes = [event.bytes for event in process.trace.events if isinstance(event.bytes, CardBytes)]
    assert [(int(size), *size.elsewhere.values()) for size in sizes] == [(8_519_680, 33_554_432)]


def test_weights_that_a_gpu_decides_to_dequantise_serve_no_others() -> None:
    gpu = find_gpu("a10")
    stored = {
        "model": {
            "class": "LlamaForCausalLM",
            "config": {**TEXT, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        },
        "data": {"sequence_length": 16},
    }
    execution = execute(
        Workload.from_mapping({**stored, "gpu": "a10"}),
        gpu,
        ExecutionOptions(others=[find_gpu("a40"), find_gpu("h200")]),
    )
    assert not execution.others


@pytest.mark.parametrize(
    ("own", "others", "kept"), [("h200", ("k80", "a10"), ("a10",)), ("k80", ("a10", "p4"), ("p4",))]
)
def test_a_library_that_does_not_run_on_a_gpu_chooses_for_none_that_is_served(
    own: str, others: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    heuristics: Any = None if own == "k80" else object()
    found = chosen_alike(heuristics, find_gpu(own), list(map(find_gpu, others)))
    assert [gpu.id for gpu in found] == list(kept)
    assert len(chosen_alike(None, find_gpu("h200"), list(map(find_gpu, others)))) == 2
