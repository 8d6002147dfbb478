"""Methods of quantisation that are refused by name, and keys that a method does not read."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.training.model import build_model
from trainatomy.workload import Workload

LLAMA = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 99}


def describe(quantization: dict[str, Any], **model: Any) -> Workload:
    named = model or {"class": "LlamaForCausalLM", "config": LLAMA}
    return Workload.from_mapping({"model": {**named, "quantization": quantization}, "data": {"sequence_length": 8}})


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
        ({"load_in_4bit": True, "dequantize": True}, "without quant_method: mxfp4"),
    ],
)
def test_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(WorkloadError, match=why):
        describe(settings)


MXFP4 = {"quant_method": "mxfp4", "dequantize": True}


def test_dequantised_weights_are_trained_whole() -> None:
    stored = {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}
    workload = describe(MXFP4, **{"class": "LlamaForCausalLM", "config": stored})
    assert not workload.model.is_quantised
    assert all(parameter.requires_grad for parameter in build_model(workload).parameters())


def test_only_weights_that_are_stored_so_are_dequantised() -> None:
    with pytest.raises(WorkloadError, match="not stored quantised, not by mxfp4"):
        build_model(describe(MXFP4))
