"""Weights in 4 and 8 bits: what layers hold, what dequantising allocates, and what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from executed import simulated
from torch import nn

import trainatomy
from trainatomy.errors import WorkloadError
from trainatomy.operators.counts import count
from trainatomy.simulator.live import on_meta
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.quantization import load_on_device, scales
from trainatomy.training.run import run as train
from trainatomy.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
bnb: Any = bitsandbytes.nn

HIDDEN, INNER, VOCABULARY = 128, 256, 512
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
LINEAR = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
"""Weights of the seven linear layers that are quantised."""
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
DOUBLE = {**FOUR, "bnb_4bit_use_double_quant": True}
EIGHT = {"load_in_8bit": True}


def describe(quantization: dict[str, Any] | None, **sections: Any) -> Workload:
    model = {
        "class": "LlamaForCausalLM",
        "config": LLAMA,
        "dtype": "bfloat16",
        "lora": {"target_modules": "all-linear"},
    }
    train = {"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": False}
    mapping: dict[str, Any] = {"model": model, "data": {"sequence_length": 32}, "train": train, "steps": 1}
    mapping |= {
        key: {**mapping.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()
    }
    if quantization is not None:
        mapping["model"] = {**mapping["model"], "quantization": quantization}
    return Workload.from_mapping(mapping)


def run(quantization: dict[str, Any] | None, **sections: Any) -> Simulation:
    return simulated(describe(quantization, **sections))


def held_by_label(simulation: Simulation) -> Counter[str]:
    """Return the requested bytes of weights and scales when the model is loaded."""
    trace, held = simulation.trace, Counter[str]()
    loaded = next(mark.event for mark in trace.marks if mark.name == "loaded")
    sizes = {event.allocation: event.bytes for event in trace.events[:loaded] if event.action == "alloc"}
    for event in trace.events[:loaded]:
        if event.action == "free":
            del sizes[event.allocation]
    for number, size in sizes.items():
        held[trace.labels.get(number, "")] += size
    return held


def requests(simulation: Simulation, phase: str, operation: str = "") -> list[int]:
    """Return the bytes of every allocation of a phase."""
    trace = simulation.trace
    wanted = {n for n, o in enumerate(trace.origins) if o.phase == phase and operation in o.operation}
    return [event.bytes for event in trace.events if event.action == "alloc" and event.allocation in wanted]


def adapters(rank: int = 8) -> int:
    widths = 4 * (HIDDEN + HIDDEN) + 3 * (HIDDEN + INNER)
    return rank * widths * 4


def test_packed_weights_and_scales() -> None:
    """4 bits a weight; a scale in fp32 for 64 weights, or in 8 bits with an fp32 scale for 256 of those."""
    plain, double = held_by_label(run(FOUR)), held_by_label(run(DOUBLE))
    float32 = 4 * (2 * VOCABULARY * HIDDEN + 3 * HIDDEN)  # prepare_model_for_kbit_training casts the others
    assert plain["weight"] == double["weight"] == LINEAR // 2 + float32 + adapters()
    blocks, layers = LINEAR // 64, 7
    assert plain["scale"] == 4 * blocks + layers * 16 * 4
    code_book = 256 * 4  # shared by all layers but for one copy each
    second = 4 * (4 * (HIDDEN * HIDDEN // 64 // 256 or 1) + 3 * (HIDDEN * INNER // 64 // 256 or 1))
    assert double["scale"] == blocks + second + layers * (16 * 4 + 4 + code_book)


def test_weights_stay_in_16_bits_where_the_model_is_not_prepared() -> None:
    prepared, plain = (held_by_label(run({**FOUR, "prepare_model_for_kbit_training": each})) for each in (True, False))
    assert prepared["weight"] - plain["weight"] == 2 * (2 * VOCABULARY * HIDDEN + 3 * HIDDEN)


def test_eight_bits_hold_a_scale_for_each_row() -> None:
    held = held_by_label(run(EIGHT))
    assert held["weight"] == LINEAR + 4 * (2 * VOCABULARY * HIDDEN + 3 * HIDDEN) + adapters()
    assert held["scale"] == 4 * (5 * HIDDEN + 2 * INNER)


def test_each_weight_is_quantised_before_the_next_is_copied() -> None:
    """Source: transformers, ``convert_and_load_state_dict_in_model``."""
    trace = run(FOUR, mode="inference", model={"lora": None}).trace
    loaded = next(mark.event for mark in trace.marks if mark.name == "loaded")
    held, sizes, most = 0, {}, 0
    copies = {n for n, o in enumerate(trace.origins) if o.operation == "copy to device"}
    for event in trace.events[:loaded]:
        if event.action == "alloc" and event.allocation in copies:
            sizes[event.allocation] = event.bytes
            held += event.bytes
        elif event.action == "free":
            held -= sizes.pop(event.allocation, 0)
        most = max(most, held)
    assert most <= held + 2 * HIDDEN * INNER


@pytest.mark.parametrize(("phase", "square"), [("forward", 4), ("backward", 1)])
def test_weights_are_dequantised_in_forward_and_backward(phase: str, square: int) -> None:
    """Above 1,536 rows bitsandbytes dequantises the weight and multiplies with cuBLAS.

    Nothing before the first attention is trained, so that only its output projection has a gradient of its input.
    """
    dequantised = requests(run(FOUR, data={"sequence_length": 1024}), phase, "aten::empty")
    assert dequantised.count(2 * HIDDEN * INNER) == 3
    assert dequantised.count(2 * HIDDEN * HIDDEN) == square


ONE_ROW: dict[str, Any] = {
    "mode": "inference",
    "model": {"lora": None},
    "data": {"sequence_length": 1},
    "train": {"per_device_train_batch_size": 1},
}
PRODUCTS = {"bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"}
"""The kernel of bitsandbytes 0.50 and later, and that of earlier releases, which takes one row only."""


def test_few_rows_are_multiplied_with_packed_weights() -> None:
    few, many = (run(FOUR, **{**ONE_ROW, "data": {"sequence_length": each}}) for each in (1, 2048))
    names = [Counter(call.name for call in each.operations.calls) for each in (few, many)]
    assert PRODUCTS & names[0].keys()
    assert not PRODUCTS & names[1].keys()
    assert "bitsandbytes::dequantize_4bit" in names[1]


def test_products_of_packed_weights_are_counted() -> None:
    for quantization, products in ((FOUR, PRODUCTS), (EIGHT, {"bitsandbytes::int8_linear_matmul"})):
        found = run(quantization, **ONE_ROW).operations.calls
        flop = {count(call).flop for call in found if call.name in products}
        assert flop == {2 * HIDDEN * HIDDEN, 2 * HIDDEN * INNER}


def test_columns_with_outliers_are_multiplied_in_16_bits() -> None:
    """30 % of the columns: their activations in 16 bits, their weights dequantised to 32 bits and then cast to 16."""
    none, some = (run({**EIGHT, "llm_int8_outlier_columns": share}) for share in (0, 0.3))
    counts = [Counter(event.bytes for event in one.trace.events if event.action == "alloc") for one in (none, some)]
    columns = 39
    assert columns == math.ceil(0.3 * HIDDEN)
    for size in (2 * 32 * columns * 2, INNER * columns, INNER * columns * 4, INNER * columns * 2):
        assert counts[0][size] == 0 < counts[1][size]
    assert any("30% of the columns of activations are assumed" in note for note in some.notes)
    assert any("no activation is assumed" in note for note in none.notes)


def test_a_checkpoint_that_is_stored_quantised(tmp_path: Path) -> None:
    """It is copied as it is: nothing in 16 bits but what is not quantised."""
    stored = {**DOUBLE, "quant_method": "bitsandbytes"}
    config = {**LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    model = {"id": str(tmp_path), "lora": {"target_modules": "all-linear"}}
    workload = describe(None).replace({"name": "stored"}).to_mapping() | {"model": model}
    simulation = simulate(Workload.from_mapping(workload), Workload.from_mapping(workload).resolve_gpu())
    loaded = held_by_label(run(DOUBLE))
    assert held_by_label(simulation)["weight"] == loaded["weight"]
    assert held_by_label(simulation)["scale"] >= loaded["scale"]
    assert 2 * HIDDEN * INNER not in requests(simulation, "load")
    assert simulation.parameters == run(DOUBLE).parameters
    with pytest.raises(WorkloadError, match="stored quantised already"):
        simulate(describe(FOUR, model={"id": str(tmp_path), "class": None, "config": {}}), workload_gpu())


def test_a_checkpoint_that_is_stored_quantised_is_trained_with_checkpointing(tmp_path: Path) -> None:
    stored = {**FOUR, "quant_method": "bitsandbytes"}
    config = {**LLAMA, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    model = {"id": str(tmp_path), "lora": {"target_modules": "all-linear"}}
    data = {"sequence_length": 512}
    read = Workload.from_mapping({"model": model, "data": data})
    unsaid, off = (simulated(each) for each in (read, read.replace("train.gradient_checkpointing", False)))
    assert any("prepare_model_for_kbit_training" in note for note in unsaid.notes)
    assert not any("prepare_model_for_kbit_training" in note for note in off.notes)

    assert len(unsaid.operations.operations) > len(off.operations.operations)


def workload_gpu() -> Any:
    return describe(None).resolve_gpu()


def test_conv1d_layers_are_quantised() -> None:
    gpt2 = {"class": "GPT2LMHeadModel", "config": {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 128}}
    held = held_by_label(run(FOUR, model={**gpt2, "lora": {"target_modules": ["c_attn"]}}))
    assert held["scale"] == 4 * (12 * 64 * 64 // 64) + 4 * 16 * 4


def test_no_outlier_is_assumed_and_said() -> None:
    assert any("llm_int8_threshold (6)" in note for note in run(EIGHT).notes)
    assert not any("llm_int8_threshold" in note for note in run({**EIGHT, "llm_int8_threshold": 0}).notes)


def test_nothing_of_the_library_changes() -> None:
    before = dict(bitsandbytes.functional.name2qmap)
    workload = describe(DOUBLE)
    simulate(workload, workload.resolve_gpu())
    assert bitsandbytes.functional.name2qmap == before


@pytest.mark.parametrize(
    ("quantization", "sections", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, {}, "cannot be combined with load_in_4bit"),
        ({"load_in_8bit": True, "bnb_4bit_quant_type": "nf4"}, {}, "no effect without load_in_4bit"),
        ({"load_in_4bit": True, "llm_int8_outlier_columns": 0.1}, {}, "no effect without load_in_8bit"),
        ({**FOUR, "llm_int8_threshold": 3.0}, {}, "no effect without load_in_8bit"),
        (FOUR, {"model": {"lora": None}}, "cannot be trained: add model.lora"),
        (FOUR, {"era": "2022"}, "layers of 4 and 8 bits"),
        (FOUR, {"parallel": {"gpus": 2, "strategy": "fsdp2"}, "loop": "pytorch"}, "several GPUs"),
        (FOUR, {"mode": "inference", "train": {"bf16_full_eval": True}}, "casts the model"),
        ({"prepare_model_for_kbit_training": False}, {}, "neither load_in_4bit nor load_in_8bit"),
    ],
)
def test_what_cannot_be_done_is_refused(quantization: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        run(quantization, **sections)


class Quantised(nn.Module):
    """A live module with layers of bitsandbytes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(64, 64), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x)).sum()


def layer_4bit() -> nn.Module:
    return bnb.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4")


def layer_8bit() -> nn.Module:
    return bnb.Linear8bitLt(64, 128, bias=False, has_fp16_weights=False)


@pytest.mark.parametrize(
    ("make", "packed", "scales"), [(layer_4bit, 64 * 128 // 2, 512 + 512), (layer_8bit, 64 * 128, 512)]
)
@pytest.mark.parametrize("is_quantised", [True, False])
def test_live_layers(make: Any, packed: int, scales: int, is_quantised: bool) -> None:
    """A module that is quantised already keeps its scales; another one is quantised when it is moved to the GPU."""
    layer = make()
    if is_quantised:
        layer = layer.to("cpu") if make is layer_4bit else layer
        if make is layer_8bit:
            layer.weight = layer.weight._quantize("cpu")
    model = Quantised(layer)
    predicted = trainatomy.predict(model, batch={"x": torch.ones(8, 64)}, loop="pytorch", gpu="h200")
    lines = {line.name: line for line in predicted.memory.lines}
    assert lines["scales of quantised weights"].bytes == scales
    assert lines["parameters"].bytes == packed + 64 * 64 * 4 + 512
    assert (layer.weight.dtype == torch.float32) is not is_quantised


def test_other_parameters_of_the_library_are_refused_by_name() -> None:
    class Odd(nn.Parameter):
        pass

    Odd.__module__ = "bitsandbytes.nn.odd"
    model = nn.Linear(8, 8)
    model.weight = Odd(torch.ones(8, 8))
    with pytest.raises(WorkloadError, match="weight of Linear is a Odd of bitsandbytes"):
        on_meta(model)


def test_a_search_may_quantise_frozen_weights() -> None:
    from trainatomy.search.axes import axes_of

    adapters = describe(None)
    found = {axis.name: axis for axis in axes_of(adapters, 4)}["quantization"]
    assert (found.given, found.permission) == ("none", "quantization")
    for option in found.options:
        changed = adapters.replace(option.settings) if option.settings else adapters
        assert (changed.model.quantization is None) == (option.name == "none")
    assert "quantization" not in {axis.name for axis in axes_of(describe(FOUR), 4)}


def loaded_on_host(quantization: dict[str, Any]) -> Any:
    workload = describe(quantization, loop="pytorch", train={"bf16": False})
    return workload, load_on_device(workload, build_model(workload), "cpu")


@pytest.mark.parametrize("quantization", [DOUBLE, EIGHT])
def test_the_same_code_trains_with_data(quantization: dict[str, Any]) -> None:
    workload, model = loaded_on_host(quantization)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(workload, model, device="cpu", steps=1, observer=Observer())
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


@pytest.mark.parametrize(("quantization", "loop"), [(DOUBLE, "pytorch"), (EIGHT, "trainer")])
def test_a_live_model_that_was_loaded_quantised(quantization: dict[str, Any], loop: str) -> None:
    """It holds what the workload holds that loads it."""
    model = loaded_on_host(quantization)[1]
    ids = torch.zeros(2, 32, dtype=torch.long)
    live = trainatomy.predict(model, batch={"input_ids": ids, "labels": ids}, loop=loop, gpu="h200")
    workload = trainatomy.predict(describe(quantization, loop=loop, train={"bf16": False}, steps=None))
    held = [{line.name: line.bytes for line in each.memory.lines} for each in (live, workload)]
    for name in ("parameters", "scales of quantised weights", "optimizer states", "saved for backward"):
        assert held[0][name] == held[1][name]


def test_looking_for_scales_computes_no_weight() -> None:
    """A weight that is parametrised is computed whenever it is read, and would be in the trace."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    calls: list[Any] = []
    layer.parametrizations.weight[0].register_forward_hook(lambda *arguments: calls.append(arguments))
    assert list(scales(layer)) == []
    assert not calls
    assert layer.weight is not None
    assert calls
