"""TF32 in models with convolutions, in every loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainatomy import predict
from trainatomy.training.process import isolated_process_settings

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


def test_precision_is_put_back_where_cudnn_was_switched_off_meanwhile() -> None:
    """Losses of CTC switch cuDNN off, which writes the precision of products."""
    backends: Any = torch.backends

    def levels() -> tuple[str, ...]:
        cudnn = backends.cudnn
        return tuple(each.fp32_precision for each in (backends, backends.cuda.matmul, cudnn, cudnn.conv, cudnn.rnn))

    before = levels()
    with isolated_process_settings():
        backends.fp32_precision = "tf32"
        with backends.cudnn.flags(enabled=False):
            pass
        assert levels() != before
    assert levels() == before
