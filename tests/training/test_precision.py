"""TF32 in models with convolutions, in every loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainatomy import predict

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.workload.schema import Workload

RUNS: dict[str, dict[str, Any]] = {
    "trainer": {"loop": "trainer"},
    "pytorch": {"loop": "pytorch"},
    "inference": {"mode": "inference"},
}


def flags() -> tuple[str, str, bool]:
    backends: Any = torch.backends
    return backends.fp32_precision, backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["ViTForImageClassification", "ResNetForImageClassification"])
def test_a_model_with_convolutions_takes_tf32_either_way(
    describe: Callable[..., Workload], name: str, run: str, tf32: bool
) -> None:
    before = flags()
    workload = describe(name, train={"tf32": tf32}, data={}, gpu="a100-80gb", **RUNS[run])
    assert predict(workload).memory.peak_allocated_bytes > 0
    assert flags() == before
