"""Models that axolotl prepares for FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated
from spread import CONFIG, collectives, labelled

from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload


def workload(prepared_by: str | None, model: dict[str, Any] | None = None, **train: Any) -> Workload:
    config = {"version": 2, **({} if prepared_by is None else {"prepared_by": prepared_by})}
    return Workload.from_mapping(
        {
            "gpu": "h200",
            "model": {"class": "LlamaForCausalLM", "config": CONFIG, "dtype": "bfloat16", **(model or {})},
            "data": {"sequence_length": 64},
            "train": {"bf16": True, "fsdp": True, "fsdp_config": {**config, **train}},
            "parallel": {"gpus": 2},
        }
    )


@pytest.mark.parametrize("loads", [True, False])
def test_trained_weights_keep_their_dtype_where_accelerate_casts_them(loads: bool) -> None:
    own, accelerates = (simulated(workload(by, cpu_ram_efficient_loading=loads)).trace for by in ("axolotl", None))
    for label in ("weight", "optimizer_state"):
        assert labelled(accelerates, label) == pytest.approx(2 * labelled(own, label), rel=0.01)


def test_each_adapter_is_gathered_by_itself() -> None:
    lora = {"lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}}
    own, accelerates = (simulated(workload(by, lora)) for by in ("axolotl", None))
    gathered = [sum(name == "nccl::all_gather" for name, _ in collectives(found)) for found in (own, accelerates)]
    assert gathered[0] > gathered[1] > 0
    assert labelled(own.trace, "optimizer_state") == pytest.approx(
        labelled(accelerates.trace, "optimizer_state"), rel=0.05
    )


def test_no_other_preparation_is_known() -> None:
    with pytest.raises(WorkloadError, match="prepared_by: must be axolotl, with loop: trainer and version: 2"):
        workload("accelerate")
    with pytest.raises(WorkloadError, match="prepared_by: must be axolotl"):
        workload("axolotl", version=1)
