"""Configurations that visitors paste: what is predicted, and what a server refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainatomy.app.configuration import workload_of
from trainatomy.errors import WorkloadError

LORA = """\
model_name_or_path: Qwen/Qwen2.5-0.5B
finetuning_type: lora
do_train: true
cutoff_len: 512
per_device_train_batch_size: 4
bf16: true
"""


def test_a_pasted_configuration_is_a_workload() -> None:
    workload = workload_of(LORA, "l4")
    assert (workload.model.id, workload.data.sequence_length, workload.gpu) == ("Qwen/Qwen2.5-0.5B", 512, "l4")
    assert workload.origin is not None and workload.origin.assumed


def test_a_pasted_training_on_preferences_is_a_workload() -> None:
    workload = workload_of(f"{LORA}stage: dpo\npref_loss: simpo\n", "l4")
    assert (workload.loop, workload.preference.loss_type) == ("preference", "simpo")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("deepspeed: /etc/passwd", "names a file, which is not read here"),
        ("optim: os.system", "names files or code"),
        ("flash_attn: kernels-community/evil", "has no value"),
        ("per_device_train_batch_size: 100000", "more than this page predicts"),
        ("cutoff_len: 9999999", "more than this page predicts"),
        ("lora_rnk: 2", "is no key of LLaMA-Factory"),
    ],
)
def test_what_a_server_does_not_do(line: str, message: str) -> None:
    key = line.split(":")[0]
    text = "".join(each for each in LORA.splitlines(keepends=True) if not each.startswith(f"{key}:"))
    with pytest.raises(WorkloadError, match=message):
        workload_of(f"{text}{line}\n", "l4")


def test_folders_of_the_server_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="is not a name on the hub"):
        workload_of(LORA.replace("Qwen/Qwen2.5-0.5B", str(tmp_path)), "l4")


@pytest.mark.parametrize("text", ["model: {factory: 'os:system'}", "- a list", "key: value"])
def test_other_texts_are_no_configurations(text: str) -> None:
    with pytest.raises(WorkloadError, match="This is no configuration of LLaMA-Factory"):
        workload_of(text, "l4")
