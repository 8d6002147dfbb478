"""Weights that torchao packs in 8 bits: what layers hold, what autograd keeps, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import trainatomy
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.versions import parse_version
from trainatomy.errors import WorkloadError
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.quantization import load_on_device, scales
from trainatomy.training.run import run as train
from trainatomy.training.stored_weights import numbers
from trainatomy.workload import Workload

quantization: Any = pytest.importorskip("torchao.quantization")
peft = pytest.importorskip("peft")

HIDDEN, INNER, VOCABULARY = 128, 256, 512
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA: dict[str, Any] = {**SIZES, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
LINEAR, ROWS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER, 5 * HIDDEN + 2 * INNER
"""Weights of the seven linear layers that are quantised, and their rows."""
OTHERS = 2 * (2 * VOCABULARY * HIDDEN + 3 * HIDDEN)
ADAPTERS = 4 * 8 * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))
INT8 = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
FP8 = {"quant_method": "torchao", "quant_type": "Float8WeightOnlyConfig"}
EVERY_LAYER = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def describe(settings: dict[str, Any] | None, train: dict[str, Any] | None = None, **top: Any) -> Workload:
    model = {"class": "LlamaForCausalLM", "config": LLAMA, "dtype": "bfloat16"}
    model |= {} if settings is None else {"quantization": settings}
    model |= {} if top.get("mode") == "inference" else {"lora": EVERY_LAYER}
    mapping = {
        "model": model,
        "data": {"sequence_length": 32},
        "train": {"per_device_train_batch_size": 2, "bf16": True, "gradient_checkpointing": False, **(train or {})},
        "steps": 2,
        **top,
    }
    return Workload.from_mapping(mapping)


def run(settings: dict[str, Any] | None, **rest: Any) -> Simulation:
    workload = describe(settings, **rest)
    return simulate(workload, workload.resolve_gpu())


def held_by_label(simulation: Simulation) -> Counter[str]:
    """Return the requested bytes by label when the model is loaded."""
    trace, live = simulation.trace, dict[int, int]()
    loaded = next(mark.event for mark in trace.marks if mark.name == "loaded")
    for event in trace.events[:loaded]:
        if event.action == "alloc":
            live[event.allocation] = event.bytes
        elif event.action == "free":
            live.pop(event.allocation, None)
    held = Counter[str]()
    for number, size in live.items():
        held[trace.labels.get(number, "")] += size
    return held


def saved(trace: Any, size: int) -> int:
    """Return how many allocations of a size that the first forward made are held when it ends."""
    ends = next(mark.event for mark in trace.marks if mark.name == "forward end")
    live = set[int]()
    for event in trace.events[:ends]:
        if event.action == "alloc" and event.bytes == size:
            live.add(event.allocation)
        elif event.action == "free":
            live.discard(event.allocation)
    return sum(trace.origins[number].phase == "forward" for number in live)


@pytest.mark.parametrize(("settings", "per_row"), [(INT8, 4 + 1), (FP8, 4)])
def test_packed_weights_and_scales(settings: dict[str, Any], per_row: int) -> None:
    """A byte a weight; for each row an fp32 scale, and of integers a zero point."""
    held = held_by_label(run(settings))
    assert held["weight"] == LINEAR + OTHERS + ADAPTERS
    assert held["scale"] == per_row * ROWS
    assert held[""] == 0


def test_autograd_keeps_weights_in_16_bits_unless_layers_are_recomputed() -> None:
    kept, recomputed = (run(INT8, train={"gradient_checkpointing": each}).trace for each in (False, True))
    wide = 2 * HIDDEN * INNER
    assert saved(kept, wide) == saved(recomputed, wide) + 3


def test_a_product_casts_its_weight_and_nothing_else() -> None:
    """Each of seven products casts a weight, and its scales to multiply by; backward multiplies by the same copies."""
    counts = []
    for settings in (INT8, None):
        operations = run(settings).operations
        counts.append(Counter((each.phase, operations.calls[each.call].name) for each in operations.operations))
    quantised, plain = counts
    for phase in ("forward", "backward"):
        assert quantised[phase, "aten::mm"] == plain[phase, "aten::mm"]
    assert quantised["forward", "aten::_to_copy"] == plain["forward", "aten::_to_copy"] + 2 * 7
    assert quantised["backward", "aten::_to_copy"] == plain["backward", "aten::_to_copy"]


def test_a_live_model_is_predicted_as_one_that_is_loaded() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16)
    quantization.quantize_(
        model,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head",
    )
    model.is_quantized = True
    adapted = peft.get_peft_model(model, peft.LoraConfig(**EVERY_LAYER))
    live = trainatomy.predict(
        adapted, per_device_train_batch_size=2, bf16=True, loop="pytorch", data={"sequence_length": 32}
    )
    loaded = trainatomy.predict(describe(INT8, loop="pytorch", steps=None))
    for component in ("weights", "activations", "optimizer_states", "gradients"):
        assert live.memory.components.as_dict()[component] == loaded.memory.components.as_dict()[component]
    assert type(model.model.layers[0].mlp.up_proj.weight.data).__name__ == "Int8Tensor"


def test_what_config_json_says_is_accepted() -> None:
    from torchao.core.config import config_to_dict

    content = {"default": config_to_dict(quantization.Int8WeightOnlyConfig())}
    named, written = (run({**INT8, "quant_type": each}) for each in ("Int8WeightOnlyConfig", content))
    assert [event.bytes for event in named.trace.events] == [event.bytes for event in written.trace.events]


def test_modules_can_be_left_out() -> None:
    held = held_by_label(run({**INT8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"]}))
    assert held["weight"] == LINEAR + HIDDEN * INNER + OTHERS + ADAPTERS


def test_inference_needs_no_adapters() -> None:
    assert held_by_label(run(FP8, mode="inference", train={"bf16": False}))["weight"] == LINEAR + OTHERS


def test_more_than_one_gpu_is_refused() -> None:
    with pytest.raises(WorkloadError, match="one GPU only"):
        describe(INT8, parallel={"gpus": 2})


def test_a_model_with_data_holds_and_trains_the_same() -> None:
    workload = describe(INT8, train={"bf16": False}, loop="pytorch")
    model = load_on_device(workload, build_model(workload), "cpu")
    weights = sum(numbers(each).nbytes for each in model.parameters())
    assert weights == LINEAR + OTHERS + ADAPTERS
    assert sum(each.nbytes for each in scales(model)) == 5 * ROWS
    train(workload, model, device="cpu", steps=1, observer=Observer())
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == 14
    assert any(bool(each.abs().sum() > 0) for name, each in model.named_parameters() if "lora_B" in name)


def test_an_optimizer_that_compiles_its_step() -> None:
    """Its states are codes and scales of blocks; its compiled step holds little more than the two means in fp32.

    In the first step PyTorch 2.13 tries kernels, with a buffer as large as the L2 cache and copies of what they
    overwrite; 2.14 writes a single kernel for the step, which has nothing to try.
    """
    pytest.importorskip("triton")
    batch = {"x": torch.zeros(2, 512)}
    found = trainatomy.predict(Squared(), batch=batch, optimizer="adamw_torch_8bit", gpu="h100", timed=False)
    numbers, cache = 512 * 512, find_gpu("h100").l2_bytes or 0
    assert found.memory.components.optimizer_states == 2 * (numbers + numbers // 256 * 4)
    tried = cache if parse_version(torch.__version__) < (2, 14) else 0
    assert tried <= found.memory.components.temporary < cache + 5.1 * numbers * 4
    assert any("adamw_torch_8bit is experimental" in note for note in found.notes)


class Squared(torch.nn.Linear):
    """A layer without a bias that returns its loss."""

    def __init__(self) -> None:
        super().__init__(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()
