"""Cut cross-entropy: a loss without logits, in workloads and in scripts that run the package's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated

from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.operators.counts import count
from trainatomy.simulator.adapters import cut_cross_entropy
from trainatomy.simulator.adapters.triton import _launch
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

HIDDEN, WORDS, LENGTH, BATCH = 64, 2048, 48, 2
COUNTED = BATCH * (LENGTH - 1)
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LORA = {"r": 4, "target_modules": ["q_proj"]}


def run(kind: str = "LlamaForCausalLM", *, cuts: bool = True, **model: Any) -> Simulation:
    described = {
        "model": {
            "class": kind,
            "config": SIZES,
            "dtype": "bfloat16",
            **({"kernels": "cut_cross_entropy"} if cuts else {}),
        },
        "data": {"sequence_length": LENGTH},
        "train": {"per_device_train_batch_size": BATCH, "max_grad_norm": 0, "optim": "sgd", "bf16": True},
    }
    described["model"].update(model)
    return simulated(Workload.from_mapping(described))


def allocated(simulation: Simulation) -> list[int]:
    return [event.bytes for event in simulation.trace.events if event.bytes]


def flop(simulation: Simulation, name: str) -> set[int | None]:
    calls = simulation.operations.calls
    return {count(call).flop for call in calls if call.name == f"cut_cross_entropy::{name}"}


def test_logits_are_never_stored() -> None:
    logits = BATCH * LENGTH * WORDS * 2
    assert logits in allocated(run(cuts=False)) and logits not in allocated(run())


def test_backward_allocates_gradients_and_a_lock_for_128_rows_of_64_columns() -> None:
    # cce_lse_forward.py and cce_backward.py: 32 bits for 94 tokens, and for 2,048 words in 16 rows of one column
    found = allocated(run())
    for bytes_of in (4 * COUNTED, 4 * WORDS, 8 * WORDS, 4, 4 * WORDS // 128):
        assert bytes_of in found
    assert any("model.kernels: cut_cross_entropy" in note for note in run().notes)


def test_the_products_are_those_that_the_kernels_compute() -> None:
    one = 2 * COUNTED * WORDS * HIDDEN
    assert (flop(run(), "forward"), flop(run(), "backward")) == ({one}, {3 * one})
    assert flop(run(lora=LORA), "backward") == {2 * one}  # the output layer is frozen


def test_logits_that_are_capped_are_capped_in_the_kernels() -> None:
    config = {**SIZES, "attn_logit_softcapping": None}  # those of attention are another matter
    names = [call.name for call in run("Gemma2ForCausalLM", config=config).operations.calls]
    assert "aten::tanh" not in names and "inductor::kernel" in names
    whole = run("Gemma2ForCausalLM", config=config, cuts=False)
    assert "aten::tanh" in [call.name for call in whole.operations.calls]


def test_weights_in_32_bits_are_refused() -> None:
    with pytest.raises(SimulationError, match="cut_cross_entropy takes float16 and bfloat16, found float32"):
        run(dtype="float32")


def test_models_that_compute_no_loss_of_words_are_refused() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    with pytest.raises(WorkloadError, match="which BertForSequenceClassification does not: leave it out"):
        run("BertForSequenceClassification", config=sizes)


class _Kernel:
    """The kernel of the package as Triton wraps it: heuristics around compiled code around a function."""

    arg_names = ("E", "C", "LSE", "LA", "Locks")

    class fn:  # noqa: N801
        @staticmethod
        def fn() -> None:
            """Stand for the source of a kernel."""


def test_launches_of_the_package_in_scripts_are_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    _Kernel.fn.fn.__name__ = "_cce_lse_forward_kernel"
    monkeypatch.setitem(cut_cross_entropy.KERNELS, "_cce_lse_forward_kernel", seen.append)  # type: ignore[arg-type]
    _launch(_Kernel, 1, 2, LSE=3, B_BIN=4)
    assert seen == [{"E": 1, "C": 2, "LSE": 3, "B_BIN": 4}]
