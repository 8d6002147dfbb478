"""``loop: preference``: what is refused, and which configurations of frameworks say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import problem, written

from trainatomy.errors import WorkloadError
from trainatomy.workload.reading import read
from trainatomy.workload.schema import Workload

LLAMAFACTORY = """\
model_name_or_path: Qwen/Qwen2.5-0.5B
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
cutoff_len: 512
output_dir: saves
bf16: true
"""


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loop": "trainer", "preference": {"loss_type": "kto"}}, "preference: needs loop: preference"),
        ({"preference": {"loss_type": "nll"}}, "preference.loss_type: must be"),
        (
            {"preference": {"loss_type": "cpo"}},
            "preference.loss_type: cpo is not simulated as LLaMA-Factory computes it",
        ),
        ({"preference": {"loss_type": "reward", "rpo_alpha": 1}}, "preference.rpo_alpha: LLaMA-Factory adds no loss"),
        ({"data": {"factory": "a:b"}}, "data.factory: is not simulated with loop: preference"),
        ({"train": {"fsdp": True}, "parallel": {"gpus": 2}}, "where a second model is the reference"),
        (
            {"preference": {"loss_type": "reward"}, "train": {"eval_strategy": "epoch"}},
            "train.eval_strategy: LLaMA-Factory keeps the scores of all answers",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload.from_mapping({"model": {"id": "Qwen/Qwen2.5-0.5B"}, "loop": "preference", **sections})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "loss", "alpha"),
    [
        ("", "sigmoid", 0.0),
        ("pref_loss: orpo\npref_beta: 0.2\n", "orpo", 0.0),
        ("pref_ftx: 0.5\n", "sigmoid", 0.5),
    ],
)
def test_llamafactory_says_its_loss(tmp_path: Path, lines: str, loss: str, alpha: float) -> None:
    workload = read(written(tmp_path, LLAMAFACTORY + lines))
    spec = workload.preference
    assert (workload.loop, spec.trainer, spec.loss_type, spec.rpo_alpha) == ("preference", "llamafactory", loss, alpha)
    assert workload.origin is not None and any("answers of a pair" in text for text in workload.origin.assumed)


@pytest.mark.parametrize(("stage", "loss"), [("kto", "kto"), ("rm", "reward")])
def test_llamafactory_trains_on_labels_and_rewards(tmp_path: Path, stage: str, loss: str) -> None:
    workload = read(written(tmp_path, LLAMAFACTORY.replace("stage: dpo", f"stage: {stage}")))
    assert workload.preference.loss_type == loss


def test_llamafactory_pads_to_a_multiple_of_eight(tmp_path: Path) -> None:
    data = read(written(tmp_path, LLAMAFACTORY.replace("512", "500"))).data
    assert (data.sequence_length, data.rounded_up(500), data.has_mask) == (500, 504, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pref_loss: siggmoid", "/train.yaml:9: pref_loss: has no value 'siggmoid'"),
        ("pref_bco_weight: 0.5", "/train.yaml:9: pref_bco_weight: not simulated"),
        ("ld_alpha: 0.5", "/train.yaml:9: ld_alpha: not simulated"),
        ("ref_model: Qwen/Qwen2.5-7B", "/train.yaml:9: ref_model: not simulated: another model as the reference"),
    ],
)
def test_llamafactory_settings_that_change_a_step_are_refused(tmp_path: Path, line: str, message: str) -> None:
    assert message in problem(tmp_path, f"{LLAMAFACTORY}{line}\n")


SWIFT = "swift rlhf --model Qwen/Qwen2.5-0.5B --torch_dtype bfloat16 --max_length 1024 --rlhf_type"


@pytest.mark.parametrize(
    ("kind", "loss", "alpha", "prompt"),
    [
        ("dpo", "sigmoid", 0.0, 512),
        ("dpo --loss_type ipo --rpo_alpha 0.1", "ipo", 0.1, 512),
        ("kto", "kto", 0.0, 512),
        ("orpo", "orpo", 0.0, None),
        ("simpo", "simpo", 1.0, None),
        ("cpo --cpo_alpha 0.5", "cpo", 0.5, None),
        ("dpo --use_logits_to_keep false", "sigmoid", 0.0, None),
    ],
)
def test_swift_says_its_loss(kind: str, loss: str, alpha: float, prompt: int | None) -> None:
    workload = read(f"{SWIFT} {kind}")
    spec = workload.preference
    assert (spec.trainer, spec.loss_type, spec.rpo_alpha, workload.data.prompt_length) == ("swift", loss, alpha, prompt)


def test_a_reward_model_of_swift_is_a_classifier() -> None:
    model = read(f"{SWIFT} rm").model
    assert (model.class_, model.config["num_labels"]) == ("AutoModelForSequenceClassification", 1)
    assert model.lora is not None and model.lora.task_type == "SEQ_CLS"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("dpo --loss_type sigmoid sft", "--loss_type: sigmoid, sft: not simulated with dpo"),
        ("kto --loss_type apo_zero_unpaired", "--loss_type: apo_zero_unpaired: not simulated with kto"),
        ("dpo --padding_free true --attn_impl flash_attn", "--padding_free: not simulated with rlhf_type dpo"),
        ("dpo --ref_adapters saved", "--ref_adapters: saved: not simulated"),
        ("rm --center_rewards_coefficient 0.01", "--center_rewards_coefficient: 0.01: not simulated"),
    ],
)
def test_swift_options_that_change_a_step_are_refused(options: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        read(f"{SWIFT} {options}")
    assert message in str(caught.value)
