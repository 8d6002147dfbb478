"""Adapters beside quantised weights on several GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from spread import CONFIG, collectives, labelled, simulated

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload

pytest.importorskip("bitsandbytes")
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
EIGHT = {"load_in_8bit": True}


def workload(quantization: dict[str, Any], loop: str, train: dict[str, Any] | None = None, **parallel: Any) -> Workload:
    model = {"class": "LlamaForCausalLM", "config": CONFIG, "quantization": quantization, "lora": {"r": 8}}
    return Workload.from_mapping(
        {
            "loop": loop,
            "gpu": "h200",
            "model": model,
            "data": {"sequence_length": 64},
            "train": {"per_device_train_batch_size": 2, "bf16": True, **(train or {})},
            "parallel": parallel,
        }
    )


@pytest.mark.parametrize("loop", ["trainer", "pytorch"])
@pytest.mark.parametrize("quantization", [FOUR, EIGHT], ids=["4", "8"])
def test_each_rank_holds_all_weights_and_reduces_the_gradients_of_its_adapters(
    quantization: dict[str, Any], loop: str
) -> None:
    alone, shared = (simulated(workload(quantization, loop, gpus=gpus)) for gpus in (1, 2))
    for label in ("weight", "optimizer_state"):
        assert labelled(shared.trace, label) == labelled(alone.trace, label) > 0
    reduced = sum(size for name, size in collectives(shared) if name == "nccl::all_reduce")
    # Beside gradients: which parameters were used, and counts of the Trainer.
    assert 0 <= reduced - 4 * shared.trainable_parameters < 100 < shared.trainable_parameters
    assert shared.trainable_parameters == alone.trainable_parameters


@pytest.mark.parametrize(
    ("loop", "train", "parallel"),
    [
        ("pytorch", {}, {"strategy": "fsdp2"}),
        ("pytorch", {}, {"strategy": "dp"}),
        ("pytorch", {}, {"tp_size": 2}),
        ("trainer", {"fsdp": True}, {}),
    ],
    ids=["fsdp2", "dp", "tp", "trainer-fsdp"],
)
def test_packed_weights_are_not_sharded(loop: str, train: dict[str, Any], parallel: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="quantised weights on several GPUs are simulated with DDP only"):
        predict(workload(FOUR, loop, train, gpus=2, **parallel), timed=False)
