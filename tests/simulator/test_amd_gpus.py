"""Trainings on AMD GPUs, from the workload to the prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy import Workload, predict
from trainatomy.catalog.gpus import device_text, find_gpu, gpus, power_of
from trainatomy.errors import WorkloadError
from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.reporters import sentences
from trainatomy.simulator.amd import check_amd
from trainatomy.simulator.cards import others_like
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.timing.cost_model import cost_model_of


def tiny(**settings: Any) -> Any:
    return predict(
        Workload.from_mapping(
            {
                "model": {"id": "openai-community/gpt2", "config": {"n_layer": 1}, **settings.pop("model", {})},
                "data": {"sequence_length": 64},
                "train": {"per_device_train_batch_size": 2, **settings.pop("train", {})},
                "gpu": "mi300x",
                **settings,
            }
        )
    )


def test_the_process_finds_a_build_for_hip_and_leaves_none_behind() -> None:
    before = torch.version.hip, torch.version.cuda
    processor = Processor((9, 4), 304, (2, 13), architecture="gfx942")
    with SimulatedProcess("AMD Instinct MI300X", 192 << 30, processor, allocation_rules()).open():
        properties = torch.cuda.get_device_properties(0)
        assert torch.version.cuda is None and torch.version.hip.startswith("7.")
        assert (properties.gcnArchName.split(":")[0], properties.warp_size) == ("gfx942", 64)
        assert torch.cuda.get_device_capability() == (9, 4) and torch.cuda.get_arch_list() == ["gfx942"]
        assert torch.cuda.is_bf16_supported()
    assert (torch.version.hip, torch.version.cuda) == before


def test_device_memory_is_a_lower_bound_and_times_are_marked() -> None:
    prediction = tiny()
    assert prediction.memory.components.context == 0
    assert "needs at least" in sentences.fit(prediction) and "at most" in sentences.fit(prediction)
    assert any("compared with no AMD GPU" in note for note in prediction.leading_notes)
    assert "unmeasured" in prediction.time.priced_by
    low, high = prediction.time.interval_seconds
    assert low == 0.5 * prediction.time.step_seconds and high >= 3.0 * prediction.time.step_seconds


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train": {"torch_compile": True}}, "torch_compile"),
        ({"train": {"optim": "adamw_torch_4bit", "bf16": True}}, "adamw_torch_4bit"),
        ({"model": {"quantization": {"load_in_4bit": True}, "lora": {"r": 8}}}, "quantised weights"),
        ({"model": {"attn_implementation": "flash_attention_2"}}, "flash_attention_2"),
        ({"parallel": {"gpus": 2}}, "several AMD GPUs"),
    ],
)
def test_what_was_not_read_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        tiny(**settings)


def test_other_releases_of_torch_are_refused() -> None:
    for release in ((2, 11), (2, 15)):
        with pytest.raises(WorkloadError, match="were read in torch"):
            check_amd(find_gpu("mi300x"), release)
        check_amd(find_gpu("h200"), release)
    check_amd(find_gpu("mi300x"), (2, 13))


def test_an_execution_serves_gpus_of_its_architecture() -> None:
    processor = Processor((9, 4), 304, (2, 13), architecture="gfx942")
    served = others_like(find_gpu("mi300x"), processor, gpus())
    assert {each.name for each in served} == {"AMD Instinct MI325X"}
    assert not any(each.architecture for each in others_like(find_gpu("h200"), processor, gpus()).values())


def test_hopper_lends_an_mi210_nothing_by_its_capability() -> None:
    mi210 = find_gpu("mi210")
    assert mi210.capability == find_gpu("h200").capability
    assert power_of(mi210) is None and device_text(mi210) is None
    assert not cost_model_of(mi210).calibrated and not cost_model_of(mi210).chip.is_asynchronous
