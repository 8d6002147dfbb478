"""Epochs that are put together from single steps equal epochs that are executed step by step."""

from copy import copy
from dataclasses import replace
from itertools import pairwise

import pytest
from training.test_images import FAMILIES
from training.test_sizes import DETR, HEARING

from trainatomy.allocator.replay import replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.errors import SimulationError
from trainatomy.results.trace import AllocationTrace
from trainatomy.simulator.lengths import Epochs, EveryStep, simulate_lengths, stand_ins_of
from trainatomy.simulator.pieces import StepLibrary, cut
from trainatomy.simulator.simulate import simulate
from trainatomy.training.lengths import BatchShape, LengthBatch, orders
from trainatomy.workload.batching import batching_of
from trainatomy.workload.schema import Workload

SEEING = "Qwen2VLForConditionalGeneration"
GPT2 = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 256}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 512}
LENGTHS = {5: 2, 40: 2, 65: 2, 203: 2}
MORE_LENGTHS = {5: 2, 9: 2, 40: 3, 64: 3, 65: 2, 120: 2, 203: 2}
"""Lengths whose steps leave memory in pieces, so that the allocator has to try again where it is short."""

LANGUAGE = {"class": "LlamaForCausalLM", "config": LLAMA}
OF_TRL = {
    "sft": {
        "model": LANGUAGE,
        "loop": "sft",
        "train": {"gradient_accumulation_steps": 2},
        "trl": {"pad_to_multiple_of": 16},
    },
    "sft, answers": {"model": LANGUAGE, "loop": "sft", "data": {"prompt_length": 4}, "trl": {"max_length": 70}},
    "sft, joined": {
        "model": LANGUAGE,
        "loop": "sft",
        "trl": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 16},
    },
    "sft, packed": {
        "model": LANGUAGE,
        "loop": "sft",
        "data": {"prompt_length": 3},
        "trl": {"packing": True, "max_length": 130},
    },
    "sft, cut into packs": {
        "model": LANGUAGE,
        "loop": "sft",
        "trl": {"packing": True, "max_length": 100, "packing_strategy": "wrapped"},
    },
    "dpo with lora": {
        "model": {**LANGUAGE, "lora": {"r": 4}},
        "loop": "dpo",
        "data": {"prompt_length": 3},
    },
    "reward, flash attention": {
        "model": {
            "class": "LlamaForSequenceClassification",
            "config": {**LLAMA, "num_labels": 1},
            "attn_implementation": "flash_attention_2",
        },
        "loop": "reward",
        "trl": {"max_length": 120},
    },
}
CASES = {
    **OF_TRL,
    "pytorch, micro-batches": {"loop": "pytorch", "train": {"gradient_accumulation_steps": 3}},
    "trainer, many micro-batches": {"train": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}},
    "gradient scaler": {"loop": "pytorch", "train": {"fp16": True}},
    "gradient scaler, zeros in gradients": {
        "zero_grad_set_to_none": False,
        "train": {"fp16": True, "gradient_accumulation_steps": 2},
    },
    "checkpointing, emptied cache": {
        "train": {"bf16": True, "gradient_checkpointing": True, "torch_empty_cache_steps": 1}
    },
    "rounded up, grouped": {
        "data": {"pad_to_multiple_of": 16},
        "train": {"bf16": True, "train_sampling_strategy": "group_by_length", "optim": "sgd"},
    },
    "flash attention, rounded up": {
        "model": {**LANGUAGE, "attn_implementation": "flash_attention_2"},
        "loop": "pytorch",
        "data": {"pad_to_multiple_of": 16},
        "train": {"bf16": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3},
    },
    "flash attention, joined": {
        "model": {**LANGUAGE, "attn_implementation": "flash_attention_2"},
        "data": {"padding_free": True},
        "train": {"bf16": True},
    },
    "quantised": {
        "model": {
            "class": "LlamaForCausalLM",
            "config": LLAMA,
            "dtype": "bfloat16",
            "lora": {"r": 4},
            "quantization": {"load_in_4bit": True},
        },
        "train": {"bf16": True, "gradient_checkpointing": True},
    },
    "encoder-decoder": {
        "model": {"class": "T5ForConditionalGeneration", "config": T5},
        "data": {"target_length": 7},
    },
    "compiled": {
        "loop": "pytorch",
        "model": LANGUAGE,
        "train": {"torch_compile": True, "bf16": True, "use_cache": False},
    },
    "recordings": {
        "loop": "pytorch",
        "model": {"class": "Wav2Vec2ForCTC", "config": {**HEARING, "feat_extract_norm": "layer"}},
        "data": {"lengths": {"histogram": {"1s": 2, "0.4s": 3, "0.7s": 3}, "orders": 1}},
        "train": {"gradient_accumulation_steps": 2},
    },
    "images, micro-batches": {
        "model": {"class": SEEING, "config": FAMILIES[SEEING]},
        "data": {"lengths": {"histogram": {"64x64": 4, "32x64": 2, "64x32": 4, "96x32": 2}, "orders": 1}},
        "train": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "bf16": True},
    },
    "images, checkpointing": {
        "model": {"class": SEEING, "config": FAMILIES[SEEING]},
        "data": {"lengths": {"histogram": {"56x56": 3, "112x112": 2, "224x112": 3}, "orders": 1}},
        "train": {"gradient_checkpointing": True},
    },
    "images with a mask": {
        "model": {"class": "DetrForObjectDetection", "config": DETR},
        "data": {
            "lengths": {"histogram": {"60x100": 3, "100x60": 3, "80x80": 2}, "orders": 1},
            "image_limits": [32, 48],
        },
    },
    "bert": {"model": {"class": "BertForMaskedLM", "config": BERT}, "train": {"bf16": True, "optim": "adafactor"}},
}


def described(changes: dict) -> Workload:
    base: dict = {
        "model": {"class": "GPT2LMHeadModel", "config": GPT2},
        "train": {"per_device_train_batch_size": 2},
        "data": {"lengths": {"histogram": LENGTHS, "orders": 1}},
    }
    for key, value in changes.items():
        together = isinstance(value, dict) and key in ("train", "data")
        base[key] = {**base[key], **value} if together else value
    return Workload.from_mapping(base)


def executed(workload: Workload, epochs: Epochs) -> AllocationTrace:
    """Return the trace of the first order, executed step by step, without the end of the run."""
    steps = len(epochs.orders[0].steps)
    trace = simulate(workload, workload.resolve_gpu(), operations=False, steps=steps, watch=EveryStep).trace
    last = [mark.event for mark in trace.marks if mark.name == "step end"][-1]
    trace.events = trace.events[:last]
    return trace


def stitched(epochs: Epochs, *, detailed: bool = False) -> AllocationTrace:
    return epochs.stitched(epochs.shapes(epochs.orders[0]), detailed=detailed).trace


@pytest.mark.parametrize("name", CASES)
def test_a_stitched_epoch_is_what_execution_writes(name: str) -> None:
    needed = {"quantised": ("bitsandbytes",), "compiled": ("triton",)}
    for library in ("trl", "datasets") if name in OF_TRL else needed.get(name, ()):
        pytest.importorskip(library)
    workload = described(CASES[name])
    epochs = simulate_lengths(workload, workload.resolve_gpu(), operations=False)
    made, wanted = stitched(epochs, detailed=True), executed(workload, epochs)
    assert made.events == wanted.events
    assert made.origins == wanted.origins[: len(made.origins)]
    assert made.labels == {number: label for number, label in wanted.labels.items() if number < len(made.origins)}
    assert [mark for mark in made.marks if mark.name != "loaded"] == [
        mark for mark in wanted.marks if mark.name != "loaded" and mark in made.marks
    ]


@pytest.fixture(scope="module")
def traces_of_many_lengths() -> tuple[AllocationTrace, AllocationTrace]:
    """Return the trace of an epoch that is put together, and of the same one executed."""
    data = {"lengths": {"histogram": MORE_LENGTHS, "orders": 1}}
    workload = described({"train": {"per_device_train_batch_size": 3}, "data": data})
    epochs = simulate_lengths(workload, workload.resolve_gpu(), operations=False)
    return stitched(epochs), executed(workload, epochs)


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "max_split_size_mb:20"])
def test_replays_of_stitched_and_executed_epochs_agree_also_where_memory_is_short(
    allocator: str, traces_of_many_lengths: tuple[AllocationTrace, AllocationTrace]
) -> None:
    traces = traces_of_many_lengths
    settings = AllocatorSettings.parse(allocator, (2, 13))
    free = [replay(trace, settings, device_bytes=2**34) for trace in traces]
    assert free[0] == free[1]
    limit = free[0].peak_reserved_bytes - 2**21
    short = [replay(trace, settings, limit, device_bytes=2**34) for trace in traces]
    assert short[0].num_alloc_retries == short[1].num_alloc_retries
    assert short[0].peak_reserved_bytes == short[1].peak_reserved_bytes <= limit
    assert short[0].num_alloc_retries or short[0].out_of_memory


def test_every_order_begins_with_its_own_first_batch() -> None:
    workload = described({"data": {"lengths": {"histogram": LENGTHS, "orders": 3}}})
    epochs = simulate_lengths(workload, workload.resolve_gpu(), operations=False)
    firsts = {tuple(epochs.shapes(order)[:1]) for order in epochs.orders}
    assert set(epochs.firsts) == firsts
    assert len(firsts) > 1


@pytest.fixture(scope="module")
def epochs() -> Epochs:
    """Return the epochs of a training by the Trainer, which the tests only read."""
    workload = described({})
    return simulate_lengths(workload, workload.resolve_gpu())


def test_operations_of_a_step_belong_to_its_length(epochs: Epochs) -> None:
    work = {
        shape.length: sum(operations.calls[one.call].flop or 0 for one in operations.operations)
        for shape, operations in epochs.operations.items()
        if shape.is_mixed
    }
    assert list(work) == sorted(work)
    assert all(shorter < longer for shorter, longer in pairwise(work.values()))


def test_the_next_longer_length_stands_for_those_left_out() -> None:
    lengths = dict.fromkeys(range(10, 110), 1)
    workload = described({"data": {"lengths": {"histogram": lengths, "shapes": 9, "orders": 4}}})
    found = stand_ins_of(workload, orders(workload))
    assert len(set(found.values())) <= 10
    assert len(found) > 20
    for shape, taken in found.items():
        assert taken.length >= shape.length
        assert taken._replace(length=shape.length) == shape
        assert not any(
            shape.length <= other.length < taken.length for other in set(found.values()) if other[::2] == shape[::2]
        )


def test_stand_ins_are_as_large_in_every_respect_where_the_number_of_tokens_matters() -> None:
    lengths = {"distribution": "uniform", "minimum": 8, "maximum": 200, "samples": 200, "shapes": 20}
    changes = {"data": {"lengths": lengths, "prompt_length": 7}, "trl": {"pad_to_multiple_of": 8}}
    workload = described({"model": LANGUAGE, "loop": "sft", "train": {"per_device_train_batch_size": 4}, **changes})
    found = stand_ins_of(workload, orders(workload))
    assert len(found) > 300
    assert 10 <= len(set(found.values())) <= 20
    for shape, taken in found.items():
        assert all(mine <= other for mine, other in zip(shape, taken, strict=True))
        assert taken.kind == shape.kind
        made = LengthBatch.of(taken, batching_of(workload))
        assert made.shape == taken
        assert min(made.lengths) > 7


def test_steps_that_keep_different_things_are_refused(epochs: Epochs) -> None:
    steps = cut(epochs.simulation.trace).steps
    changed = [steps[1][0], replace(steps[1][1], kept=steps[1][1].kept[:-1]), steps[1][2]]
    with pytest.raises(SimulationError, match="what a step keeps depends on the length"):
        StepLibrary({BatchShape(2, 9, True): steps[2], BatchShape(2, 5, True): changed})


def test_memory_that_a_later_step_takes_for_good_is_refused(epochs: Epochs) -> None:
    trace = copy(epochs.simulation.trace)
    ends = [mark.event for mark in trace.marks if mark.name == "step end"]
    freed = next(event for event in trace.events[ends[1] : ends[2]] if event.action == "free")
    trace.events = [event for event in trace.events if event != freed]
    with pytest.raises(SimulationError, match="keeps memory that no step before did"):
        cut(trace)
