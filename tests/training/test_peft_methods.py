"""Methods of peft besides LoRA."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.training.model import build_model
from trainatomy.training.peft_methods import METHODS, REFUSED
from trainatomy.workload.schema import Workload

pytest.importorskip("peft")
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
OF_A_LANGUAGE_MODEL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ADALORA": {**TARGETS, "total_step": 100},
    "GRALORA": {**TARGETS, "r": 8},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {},
    "MISS": {**TARGETS, "r": 8},
    "OFT": {**TARGETS, "r": 0, "oft_block_size": 8},
    "PREFIX_TUNING": OF_A_LANGUAGE_MODEL,
    "PROMPT_TUNING": OF_A_LANGUAGE_MODEL,
    "P_TUNING": {**OF_A_LANGUAGE_MODEL, "encoder_hidden_size": 32},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2]},
    "VBLORA": {**TARGETS, "vector_length": 32, "num_vectors": 16},
}


def workload(method: str, **rest: Any) -> Workload:
    adapters = {"peft_type": method, **ARGUMENTS.get(method, TARGETS)}
    return Workload.from_mapping(
        {
            "gpu": "l4",
            "model": {"class": "LlamaForCausalLM", "config": CONFIG, "peft": adapters},
            "data": {"sequence_length": 16},
            "train": {"per_device_train_batch_size": 2, "optim": "adamw_torch", "optim_args": "foreach=False"},
            **rest,
        }
    )


def rounded(size: int) -> int:
    return -(-size // 512) * 512


@pytest.mark.parametrize("method", METHODS)
def test_states_and_weights_are_those_of_the_model_that_peft_makes(method: str) -> None:
    """Adam keeps two averages and, on the GPU, no number of steps; the model on the CPU has values."""
    real = build_model(workload(method))
    trained = [parameter for parameter in real.parameters() if parameter.requires_grad]
    tensors = {id(tensor): tensor for tensor in (*real.parameters(), *real.buffers())}.values()
    found = predict(workload(method), timed=False).memory.components
    updated = sum(2 * rounded(parameter.nbytes) for parameter in trained)
    assert found.optimizer_states == updated
    assert found.weights == sum(rounded(tensor.nbytes) for tensor in tensors)


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_methods_that_are_not_simulated_are_refused_with_their_reason(method: str) -> None:
    with pytest.raises(WorkloadError, match=f"model.peft: {method}: is not simulated: {REFUSED[method][:12]}"):
        predict(workload(method), timed=False)


def test_the_page_names_what_peft_and_transformers_have() -> None:
    from transformers.training_args import OptimizerNames

    page = (Path(__file__).parents[2] / "docs" / "adapters-and-optimizers.md").read_text(encoding="utf-8")
    simulated = next(line for line in page.splitlines() if line.startswith("| ADALORA"))
    assert simulated.split("|")[1].strip().split(", ") == sorted(METHODS)
    assert set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", page)) >= set(REFUSED)
    listed = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `")))
    assert sorted(set(listed) - {"train"}) == sorted(name.value for name in OptimizerNames)


def test_mistakes_are_named() -> None:
    with pytest.raises(WorkloadError, match=r"peft has no method VERRA; did you mean VERA"):
        predict(workload("VERRA"), timed=False)
    with pytest.raises(WorkloadError, match=r"peft refuses VERA: .*unexpected keyword argument 'rank'"):
        predict(workload("VERA").replace({"model.peft.rank": 8}), timed=False)
    with pytest.raises(WorkloadError, match="needs `peft_type`"):
        workload("VERA").replace({"model.peft": {"r": 8}})
    with pytest.raises(WorkloadError, match=r"model.peft: .*model.lora is simulated there"):
        workload("VERA").replace({"train.fsdp": True, "parallel.gpus": 2})
