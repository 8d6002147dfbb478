"""Liger's layers without their Triton kernels: what their Python allocates."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from trainatomy.errors import MissingLibrary
from trainatomy.simulator.adapters import liger as simulated
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

LLAMA = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = 96


def workload(**train: Any) -> Workload:
    settings = {"per_device_train_batch_size": 2, "max_grad_norm": 0, "optim": "sgd", "bf16": True, **train}
    model = {"class": "LlamaForCausalLM", "config": LLAMA}
    return Workload.from_mapping({"model": model, "data": {"sequence_length": TOKENS // 2}, "train": settings})


def run(**train: Any) -> Simulation:
    described = workload(**train)
    return simulate(described, described.resolve_gpu())


def allocated(simulation: Simulation) -> list[int]:
    return [event.bytes for event in simulation.trace.events if event.bytes]


def names(simulation: Simulation) -> list[str]:
    operations = simulation.operations
    return [operations.calls[operation.call].name for operation in operations.operations]


@pytest.fixture
def liger() -> None:
    pytest.importorskip("liger_kernel")


@pytest.mark.usefixtures("liger")
def test_the_fused_loss_stores_logits_of_one_chunk() -> None:
    logits = TOKENS * LLAMA["vocab_size"] * 2
    # ops/fused_linear_cross_entropy.py: V / H = 32 chunks of 4 tokens, in the autocast dtype
    chunk = 4 * LLAMA["vocab_size"] * 2
    plain, fused = run(), run(use_liger_kernel=True)
    assert logits in allocated(plain) and logits not in allocated(fused)
    assert chunk in allocated(fused)
    assert "aten::_log_softmax" in names(plain) and "aten::_log_softmax" not in names(fused)


@pytest.mark.usefixtures("liger")
def test_launches_are_operations_that_move_their_tensors_once() -> None:
    simulation = run(use_liger_kernel=True)
    kernels = [call for call in simulation.operations.calls if call.name == "triton::kernel"]
    hidden = TOKENS * LLAMA["hidden_size"]
    assert any(sum(array.elements == hidden for array in call.inputs) == 2 for call in kernels)  # RMSNorm's X and Y
    assert names(simulation).count("triton::kernel") >= 2 * (TOKENS // 4 // 2)
    assert any("Liger's own Python" in note for note in simulation.notes)


@pytest.mark.usefixtures("liger")
def test_the_configuration_chooses_layers() -> None:
    off = {"rope": False, "rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": False}
    simulation = run(use_liger_kernel=True, liger_kernel_config=off)
    assert "triton::kernel" not in names(simulation) and allocated(simulation) == allocated(run())


@pytest.mark.usefixtures("liger")
def test_nothing_outside_the_model_stays_patched() -> None:
    from transformers.models.llama import modeling_llama
    from triton.runtime.jit import JITFunction

    before = (dict(vars(modeling_llama)), torch.nn.functional.cross_entropy, JITFunction.run)
    run(use_liger_kernel=True)
    assert (dict(vars(modeling_llama)), torch.nn.functional.cross_entropy, JITFunction.run) == before


def test_without_the_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingLibrary, match=r"train.use_liger_kernel needs triton.*pip install 'trainatomy\[liger\]'"):
        simulated.import_liger()


@pytest.mark.usefixtures("liger")
def test_compiled_the_kernels_are_launched_by_inductors_code() -> None:
    pytest.importorskip("triton")
    described = workload(use_liger_kernel=True, torch_compile=True).replace({"model.dtype": "bfloat16"})
    found = simulate(described, described.resolve_gpu())
    launches = [call for call in found.operations.calls if call.name == "triton::kernel"]
    # ops/rms_norm.py: a row of the weight's gradient for each of the H200's 132 multiprocessors
    assert any(tensor.shape == (132, LLAMA["hidden_size"]) for call in launches for tensor in call.inputs)
    assert any("compiler.disable" in note and "Dynamo breaks" in note for note in found.notes)  # backends/dispatch.py
