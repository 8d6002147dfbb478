"""Methods of quantisation that are refused by name, and keys that a method does not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.errors import WorkloadError
from trainatomy.training.model import build_model
from trainatomy.workload import Workload
from trainatomy.workload.quantization import DEQUANTISED

TORCHAO = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
LLAMA = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 99}


def describe(quantization: dict[str, Any], **model: Any) -> Workload:
    named = model or {"class": "LlamaForCausalLM", "config": LLAMA}
    return Workload.from_mapping({"model": {**named, "quantization": quantization}, "mode": "inference"})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quant_method": "gptq"}, "by gptq are not simulated, with gptqmodel installed or without"),
        ({"quant_method": "fp8"}, "transformers does not train weights quantised by fp8"),
        ({"quant_method": "nonsense"}, "quantised by nonsense are not simulated"),
        ({"quant_method": "mxfp4"}, "set dequantize: true"),
        ({"quant_method": "torchao"}, "names no configuration: choose Int8WeightOnlyConfig"),
        ({"quant_method": "torchao", "quant_type": "Int4WeightOnlyConfig"}, "Int4WeightOnlyConfig is not simulated"),
        ({"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig", "load_in_4bit": True}, "no effect with"),
        ({"load_in_4bit": True, "quant_type": "Int8WeightOnlyConfig"}, "without quant_method: torchao"),
        ({"load_in_4bit": True, "dequantize": True}, "without quant_method: mxfp4 or fp8"),
    ],
)
def test_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(WorkloadError, match=why):
        describe(settings)


def test_a_refused_method_is_the_only_complaint_about_its_section() -> None:
    """Its keys are not known here, which is no mistake of whoever wrote them."""
    with pytest.raises(WorkloadError) as refused:
        describe({"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert str(refused.value).startswith("model.quantization: ")
    assert "unknown key" not in str(refused.value)


def stored_by(method: str, **settings: Any) -> dict[str, Any]:
    config = {**LLAMA, "quantization_config": {"quant_method": method, **settings}}
    return {"class": "LlamaForCausalLM", "config": config}


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": "all-linear"}], ids=["whole", "adapters"])
@pytest.mark.parametrize("by_section", [True, False], ids=["section", "config"])
@pytest.mark.parametrize("method", DEQUANTISED)
def test_dequantised_weights_are_dense_and_adapted_as_any(method: str, by_section: bool, lora: Any) -> None:
    """However dequantising is asked for, adapters are added where they are asked for; weights are in 16 bits."""
    model = stored_by(method) if by_section else stored_by(method, dequantize=True)
    model |= {"quantization": {"quant_method": method, "dequantize": True}} if by_section else {}
    workload = Workload.from_mapping({"model": {**model, "lora": lora}, "data": {"sequence_length": 8}})
    assert not workload.model.is_quantised
    parameters = dict(build_model(workload).named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    adapters = {name for name in parameters if "lora_" in name}
    assert bool(adapters) == (lora is not None)
    assert trained == (adapters or set(parameters))
    assert {parameter.dtype for name, parameter in parameters.items() if name not in adapters} == {torch.bfloat16}


def test_only_weights_that_are_stored_so_are_dequantised() -> None:
    for method in DEQUANTISED:
        with pytest.raises(WorkloadError, match=f"not stored quantised, not by {method}"):
            build_model(describe({"quant_method": method, "dequantize": True}))
    with pytest.raises(WorkloadError, match="stored quantised by fp8, not by mxfp4"):
        build_model(describe({"quant_method": "mxfp4", "dequantize": True}, **stored_by("fp8")))


@pytest.mark.parametrize("method", [*DEQUANTISED, "gptq", "awq"])
@pytest.mark.parametrize("quantization", [{"load_in_4bit": True}, {"load_in_8bit": True}, TORCHAO])
def test_weights_that_are_stored_quantised_are_not_quantised_again(method: str, quantization: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="stored quantised already"):
        build_model(describe(quantization, **stored_by(method)))
