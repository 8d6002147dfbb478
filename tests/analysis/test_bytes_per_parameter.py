"""Rules of thumb for bytes per parameter, and the reasons why a training differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traces_by_hand import MIB, one_step

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory
from trainatomy.analysis.published import bytes_per_parameter
from trainatomy.results.memory import Memory
from trainatomy.results.prediction import BytesPerParameter
from trainatomy.workload import Workload

PARAMETERS = MIB  # of 4 bytes: the weights of the handmade step


def memory(**changes: Any) -> Memory:
    """Return the memory of the handmade step: weights and gradients of 4 MiB, no states yet."""
    analysis = analyze_memory(one_step()[0], AllocatorSettings(), 1 << 40, 0).memory
    return replace(analysis, components=replace(analysis.components, **changes))


def rule(train: dict[str, Any] | None = None, held: Memory | None = None, **sections: Any) -> BytesPerParameter:
    trainable = sections.pop("trainable", PARAMETERS)
    model = {"id": "gpt2", **sections.pop("model", {})}
    workload = Workload.from_mapping({"model": model, "train": train or {}, **sections})
    return bytes_per_parameter(workload, PARAMETERS, trainable, held or memory())


@pytest.mark.parametrize(
    ("optim", "in_fp32", "mixed"),
    [
        ("adamw_torch", 16.0, 18.0),
        ("adamw_torch_fused", 16.0, 18.0),
        ("torch.optim.adamw.AdamW", 16.0, 18.0),
        ("adamw_bnb_8bit", 10.0, 12.0),
        ("paged_adamw_8bit", 10.0, 12.0),
        ("bitsandbytes.optim.Adam8bit", 10.0, 12.0),
        ("sgd", 8.0, 10.0),
        ("adafactor", None, None),
        ("adamw_torch_4bit", None, None),
    ],
)
def test_optimizer_rules(optim: str, in_fp32: float | None, mixed: float | None) -> None:
    assert rule({"optim": optim}).rule == in_fp32
    assert rule({"optim": optim, "fp16": True}).rule == rule({"optim": optim, "bf16": True}).rule == mixed


def test_sgd_with_momentum_has_a_state() -> None:
    with_momentum = rule({"optim": "sgd", "optim_args": "momentum=0.9"})
    assert (with_momentum.rule, with_momentum.rule_name) == (12.0, "fp32 with SGD with momentum")


def test_weights_that_are_dequantised_while_they_are_loaded_are_not_kept_quantised() -> None:
    spec = {"quant_method": "mxfp4", "dequantize": True}
    assert "quantised_parameters" not in rule(model={"dtype": "bfloat16", "quantization": spec}).reasons
    assert "quantised_parameters" in rule(model={"quantization": {"load_in_4bit": True}, "lora": {}}).reasons


def test_inference_rule() -> None:
    assert (rule(mode="inference").rule, rule(mode="inference").rule_name) == (4.0, "inference in fp32")
    assert rule({"fp16": True}, mode="inference").rule == 6.0


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_16_bit_weights_have_a_reason_instead_of_a_rule(mode: str) -> None:
    found = rule(mode=mode, model={"dtype": "bfloat16"})
    assert found.rule is None
    assert "low_precision_parameters" in found.reasons


def test_parts_are_bytes_per_parameter() -> None:
    found = rule()
    assert found.parts == {"weights": 4.0, "optimizer_states": 0.0, "gradients": 4.0}
    assert found.actual == 8.0
    assert "optimizer_states_not_created" in found.reasons


def test_no_reasons_without_a_difference() -> None:
    found = rule(held=memory(optimizer_states=8 * MIB))
    assert (found.actual, found.rule, found.reasons) == (16.0, 16.0, ())


def test_frozen_parameters_are_a_reason() -> None:
    reasons = rule(held=memory(optimizer_states=8), trainable=PARAMETERS // 2).reasons
    assert reasons == ("frozen_parameters",)


def test_missing_autocast_copies_are_a_reason() -> None:
    reasons = rule({"fp16": True}, held=memory(optimizer_states=8 * MIB)).reasons
    assert reasons == ("autocast_copies_not_at_peak",)


def test_a_model_without_parameters() -> None:
    workload = Workload.from_mapping({"model": {"id": "gpt2"}})
    assert bytes_per_parameter(workload, 0, 0, memory(weights=0, gradients=0)).actual == 0.0
