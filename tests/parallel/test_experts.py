"""Expert parallelism: ranks share the experts of a mixture, by transformers' own code."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated
from spread import CONFIG, collectives, labelled
from spread import workload as described
from transformers import PreTrainedModel

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.operators.counts import count
from trainatomy.workload.schema import Workload

SENDS_ROWS = hasattr(PreTrainedModel, "_expand_parallel_plan")
LAYERS, HIDDEN, INNER, EXPERTS = 2, 64, 32, 8
SIZES = {
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "vocab_size": 200, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURE = {"class": "Qwen3MoeForCausalLM", "config": SIZES}
OF_EXPERTS = LAYERS * EXPERTS * 3 * HIDDEN * INNER * 4
"""Bytes of the experts' weights."""


def workload(**parallel: Any) -> Workload:
    given = described(**{"gpus": 2, "tp_size": 2, "enable_expert_parallel": True, **parallel})
    return Workload.from_mapping(given.to_mapping() | {"model": MIXTURE})


@pytest.mark.parametrize("label", ["weight", "gradient"])
def test_each_rank_holds_its_experts_and_everything_else(label: str) -> None:
    alone = simulated(workload(gpus=1, tp_size=1, enable_expert_parallel=False))
    assert labelled(alone.trace, label) - labelled(simulated(workload()).trace, label) == OF_EXPERTS // 2


@pytest.mark.skipif(SENDS_ROWS, reason="transformers 5.23 and later send rows to the ranks of their experts")
def test_results_of_experts_are_added_up() -> None:
    hidden = 2 * 64 * HIDDEN * 4
    found = [size for name, size in collectives(simulated(workload())) if name == "nccl::all_reduce"]
    assert found.count(hidden) == 2 * LAYERS  # forward and backward


@pytest.mark.skipif(not SENDS_ROWS, reason="transformers before 5.23 masks the rows of other ranks' experts")
def test_each_rank_sends_half_of_the_rows_to_their_experts_and_back() -> None:
    rows = 2 * 64 * 2 // 2 * HIDDEN * 4  # each token goes to two experts; this rank has half of the tokens
    found = [size for name, size in collectives(simulated(workload())) if name == "nccl::all_to_all"]
    assert found.count(rows) == 4 * LAYERS  # to the experts and back, in forward and in backward


def test_it_runs_with_fsdp() -> None:
    assert set(simulated(workload(gpus=4, strategy="fsdp2")).communicators) == {(0, 1), (0, 2)}


def test_a_rank_computes_the_rows_of_its_experts() -> None:
    alone, shared = (
        [call for call in simulated(one).operations.calls if call.name == "aten::_grouped_mm"]
        for one in (workload(gpus=1, tp_size=1, enable_expert_parallel=False), workload())
    )
    assert [count(call).flop for call in shared] == [count(call).flop / 2 for call in alone]
    assert alone
    assert any("equally many rows" in note for note in predict(workload()).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"gpus": 2, "enable_expert_parallel": True}}, "set it"),
        ({"loop": "trainer"}, "with loop: pytorch only"),
        ({"model": {"class": "LlamaForCausalLM", "config": CONFIG}}, "no plan for expert parallelism"),
        ({"model": {**MIXTURE, "config": {**SIZES, "num_experts": 7}}}, "Cannot evenly shard 7 experts"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        predict(Workload.from_mapping(workload().to_mapping() | changes), timed=False)
