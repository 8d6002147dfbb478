"""FlashAttention 2 without its library: what its functions hold for backward, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as utilities
from transformers import modeling_utils

from trainatomy.errors import SimulationError
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.training.samples import PADDED_SHARE
from trainatomy.workload import Workload

LLAMA = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
BATCH, LENGTH, HEADS, HEAD = 2, 64, 4, 32


def describe(attention: str = "flash_attention_2", gpu: str = "h200", key_heads: int = 2, **sections: Any) -> Workload:
    config = {**LLAMA, "num_key_value_heads": key_heads}
    return Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": config, "attn_implementation": attention},
            "data": {"sequence_length": LENGTH, **sections.pop("data", {})},
            "train": {"per_device_train_batch_size": BATCH, **sections.pop("train", {"bf16": True})},
            "gpu": gpu,
            **sections,
        }
    )


def run(attention: str = "flash_attention_2", **sections: Any) -> Simulation:
    workload = describe(attention, **sections)
    return simulate(workload, workload.resolve_gpu())


def made(simulation: Simulation, phase: str) -> list[int]:
    """Return the sizes of what attention makes in a phase of the second step."""
    trace = simulation.trace
    return [
        event.bytes
        for event in trace.events
        if event.action == "alloc"
        and trace.origins[event.allocation].step == 1
        and trace.origins[event.allocation].phase == phase
        and trace.origins[event.allocation].module.endswith("self_attn")
    ]


def test_forward_and_backward_hold_what_the_library_allocates() -> None:
    simulation = run()
    sums = BATCH * HEADS * LENGTH * 4
    assert made(simulation, "forward").count(sums) == 1
    assert made(simulation, "forward").count(16) == 1  # the state of random numbers
    rows = 128  # queries are rounded up
    backward = made(simulation, "backward")
    assert BATCH * HEADS * rows * 4 in backward
    assert BATCH * HEADS * rows * HEAD * 4 in backward
    assert backward.count(BATCH * HEADS * LENGTH * HEAD * 2) >= 3  # a gradient of the queries, and of each head's keys


def test_large_tensors_are_those_of_pytorchs_own_kernel() -> None:
    """PyTorch's kernel is a copy of the library's."""

    def large(simulation: Simulation) -> list[int]:
        return sorted(size for phase in ("forward", "backward") for size in made(simulation, phase) if size >= 1024)

    settings = {"key_heads": HEADS, "gpu": "a100"}  # on Hopper, PyTorch prefers cuDNN's
    assert large(run(**settings)) == large(run("sdpa", **settings))


def test_padded_tokens_are_left_out() -> None:
    simulation = run(data={"padding": True})
    kept = BATCH * (LENGTH - LENGTH // PADDED_SHARE)
    assert HEADS * kept * 4 in made(simulation, "forward")
    assert HEADS * (kept + 128 * BATCH) * 4 in made(simulation, "backward")


def test_samples_in_one_row_are_told_apart() -> None:
    data = {"padding_free": True, "lengths": {"histogram": {LENGTH: 4}}, "sequence_length": None}
    workload = describe(data=data)
    simulation = simulate(workload, workload.resolve_gpu(), steps=2)
    assert HEADS * (BATCH * LENGTH + 128 * BATCH) * 4 in made(simulation, "backward")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {}}, "takes float16 and bfloat16 .* found float32 and 32: train in bf16"),
        ({"gpu": "t4"}, "needs an Ampere GPU or a newer one: use sdpa"),
    ],
)
def test_what_the_library_refuses_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=f"flash_attention_2 {message}"):
        run(**sections)


def test_the_package_kernels_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would take the kernel of the hub where that package is installed, which no simulation can run."""
    alone = run().trace.events
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *_: True)
    assert run().trace.events == alone


def test_transformers_is_left_as_it_was() -> None:
    before = utilities._lazy_imports, utilities._loaded_implementation, utilities._flash_fn
    run()
    assert (utilities._lazy_imports, utilities._loaded_implementation, utilities._flash_fn) == before
    assert torch.get_default_device().type == "cpu"
