"""What a plain loop can do with outputs, layers and gathered weights: hold outputs, use Liger, keep the last layer."""

from __future__ import annotations

from typing import Any

import pytest

import trainatomy
from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32768,
}
TOKENS = 2 * 128


def workload(train: dict[str, Any] | None = None, **keys: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": CONFIG, "dtype": "bfloat16"},
            "loop": "pytorch",
            "data": {"sequence_length": TOKENS // 2},
            "train": {"per_device_train_batch_size": 2, **(train or {})},
            **keys,
        }
    )


def peak(described: Workload) -> int:
    return trainatomy.predict(described, timed=False).memory.peak_allocated_bytes


def test_outputs_that_are_kept_hold_the_logits_at_the_peak() -> None:
    logits = TOKENS * CONFIG["vocab_size"] * 2  # bfloat16
    assert peak(workload(keep_outputs=True)) - peak(workload()) == logits


@pytest.mark.parametrize("keys", [{"loop": "trainer"}, {"parallel": {"gpus": 2, "pp_size": 2}}])
def test_outputs_are_kept_by_a_plain_loop_only(keys: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="keep_outputs"):
        workload(keep_outputs=True, **keys)


def test_a_plain_loop_replaces_layers_by_ligers() -> None:
    pytest.importorskip("liger_kernel")
    layers = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    liger = {"use_liger_kernel": True, "liger_kernel_config": layers}
    assert peak(workload(liger)) < peak(workload())


def test_the_gathered_weights_of_the_last_layer_can_stay() -> None:
    def seconds(reshard: Any) -> float:
        parallel = {"gpus": 4, "strategy": "fsdp2", "reshard_after_forward": reshard}
        return trainatomy.predict(workload(parallel=parallel)).time.communication.seconds

    assert seconds(None) > seconds("all_but_last")
    with pytest.raises(WorkloadError, match="all_but_last belongs to strategy fsdp2"):
        workload(parallel={"gpus": 4, "strategy": "fsdp1", "reshard_after_forward": "all_but_last"})
