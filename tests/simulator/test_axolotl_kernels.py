"""axolotl's functions for adapters: what they compute, keep for backward and dequantise, and where they are used."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executed import simulated

from trainatomy.errors import WorkloadError
from trainatomy.simulator.adapters.axolotl import apply_lora_o, apply_lora_qkv
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload
from trainatomy.workload.model import LORA_KERNELS

HIDDEN, WIDE, LENGTH, BATCH, LAYERS = 64, 128, 48, 2, 2
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DOUBLE = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FOUR_BITS = {**DOUBLE, "bnb_4bit_compute_dtype": "bfloat16", "prepare_model_for_kbit_training": False}


def run(*kernels: str, kind: str = "LlamaForCausalLM", targets: Any = "all-linear", **model: Any) -> Simulation:
    lora = {"r": 4, "target_modules": targets, "task_type": "CAUSAL_LM"}
    spec = {"class": kind, "config": SIZES, "dtype": "bfloat16", "kernels": kernels, "lora": lora, **model}
    train = {"per_device_train_batch_size": BATCH, "max_grad_norm": 0, "optim": "sgd", "bf16": True}
    return simulated(
        Workload.from_mapping({"model": spec, "data": {"sequence_length": LENGTH}, "train": train, "steps": 1})
    )


def operations(simulation: Simulation) -> Counter[str]:
    calls = simulation.operations.calls
    return Counter(calls[operation.call].name for operation in simulation.operations.operations)


def allocations(simulation: Simulation, bytes_of: int) -> int:
    return sum(event.bytes == bytes_of and event.action == "alloc" for event in simulation.trace.events)


def adapted(columns: int, rows: int, dropout: float) -> Any:
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import Linear

    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=dropout, init_lora_weights=False)
    return Linear(
        torch.nn.Linear(columns, rows).requires_grad_(False), "default", config, r=3, lora_alpha=6, lora_dropout=dropout
    )


@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj"), ("o_proj",)])
def test_outputs_and_gradients_are_those_of_peft(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layers = {name: adapted(8, rows, 0.0) for name, rows in zip(names, (8, 4, 4), strict=False)}
    block, x = SimpleNamespace(training=True, **layers), torch.randn(2, 5, 8, requires_grad=True)
    weights = [
        each for layer in layers.values() for each in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    ]

    def results(outputs: Any) -> list[torch.Tensor]:
        found = torch.autograd.grad(sum(each.square().sum() for each in outputs), [x, *weights])
        return [*outputs, *found]

    ours = apply_lora_qkv(block, x) if len(names) > 1 else [apply_lora_o(block, x)]
    for one, other in zip(results(ours), results([layer(x) for layer in layers.values()]), strict=True):
        torch.testing.assert_close(one, other)


def test_a_dropped_input_gets_its_own_gradient() -> None:
    torch.manual_seed(0)
    layer, x = adapted(8, 8, 0.5), torch.randn(2, 5, 8, requires_grad=True)
    torch.manual_seed(1)
    (of_ours,) = torch.autograd.grad(apply_lora_o(SimpleNamespace(training=True, o_proj=layer), x).sum(), x)
    torch.manual_seed(1)
    (of_peft,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(of_ours, of_peft)


def test_inputs_of_adapters_are_not_copied_in_float32() -> None:
    copied = BATCH * LENGTH * WIDE * 4
    assert allocations(run(), copied) > allocations(run(*LORA_KERNELS), copied)
    assert operations(run(*LORA_KERNELS))["triton::kernel"] == 2 * LAYERS  # the activation, forward and backward
    assert "aten::silu" not in operations(run("lora_mlp_kernel"))


def test_weights_of_4_bits_are_whole_once_forward_and_once_backward() -> None:
    pytest.importorskip("bitsandbytes")
    found = operations(run(*LORA_KERNELS, quantization=FOUR_BITS))
    assert found["bitsandbytes::dequantize_4bit"] == 2 * 7 * LAYERS
    assert found["bitsandbytes::dequantize_blockwise"] == 2 * 7 * LAYERS  # scales, which are quantised, too


def test_only_layers_all_of_which_have_adapters_are_replaced() -> None:
    some = ["q_proj", "v_proj", "gate_proj"]
    assert operations(run(*LORA_KERNELS, targets=some)) == operations(run(targets=some))


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("PhiForCausalLM", SIZES, "lora_qkv_kernel and lora_o_kernel: axolotl stops with PhiAttention"),
        ("GPTNeoXForCausalLM", {"num_hidden_layers": 1}, "axolotl finds no layers in GPTNeoXForCausalLM"),
        (
            "LlamaForCausalLM",
            {**SIZES, "hidden_act": "relu"},
            "lora_mlp_kernel: axolotl stops with the activation relu",
        ),
    ],
)
def test_models_with_which_axolotl_stops_are_refused(kind: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        run(*LORA_KERNELS, kind=kind, config=sizes)


@pytest.mark.parametrize(("loss", "kernels", "copies"), [("sigmoid", 4, 3), ("orpo", 2, 2)])
def test_tokens_of_pairs_are_scored_by_kernels_that_copy_the_logits(loss: str, kernels: int, copies: int) -> None:
    """The copy of logits without the last one, of the model and of the reference, and its gradient."""
    described = {
        "loop": "preference",
        "preference": {"trainer": "axolotl", "loss_type": loss},
        "model": {"class": "LlamaForCausalLM", "config": SIZES, "dtype": "bfloat16"},
        "data": {"sequence_length": LENGTH},
        "train": {"per_device_train_batch_size": BATCH, "optim": "sgd", "bf16": True, "max_grad_norm": 0},
        "steps": 1,
    }
    simulation = simulated(Workload.from_mapping(described))
    assert operations(simulation)["triton::kernel"] == kernels
    assert (allocations(simulation, 2 * BATCH * (LENGTH - 1) * SIZES["vocab_size"] * 4)) == copies
    trained = [mark.event for mark in simulation.trace.marks if mark.name == "backward end"]
    emptied = sum(event.action == "empty_cache" for event in simulation.trace.events[trained[0] :])
    assert emptied == (len(trained) if loss == "sigmoid" else 0)
    assert any("selective_log_softmax" in str(note) for note in simulation.notes)
