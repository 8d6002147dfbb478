"""Keywords beside a workload are applied or refused, never dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trainatomy
from trainatomy import api
from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload

CONFIG = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100}
WORKLOAD = Workload.from_mapping({
    "model": {"class": "GPT2LMHeadModel", "config": CONFIG},
    "data": {"sequence_length": 16},
    "train": {"per_device_train_batch_size": 2, "fp16": True},
})  # fmt: skip


def test_settings_override_those_of_the_workload() -> None:
    found = trainatomy.predict(
        WORKLOAD, bf16=True, optimizer=torch.optim.SGD, gpu="a100", data={"target_length": None}, loop="pytorch",
        per_device_train_batch_size=3, timed=False,
    )  # fmt: skip
    same = WORKLOAD.replace({
        "train.bf16": True, "train.optim": f"{torch.optim.SGD.__module__}.SGD", "gpu": "a100", "loop": "pytorch",
        "train.per_device_train_batch_size": 3,
    })  # fmt: skip
    assert found.workload == same.to_mapping()
    assert "fp16" not in found.workload["train"]  # type: ignore[operator]
    assert found.memory == trainatomy.predict(same, timed=False).memory
    assert WORKLOAD.train.fp16


def test_a_batch_is_the_batch_that_is_used() -> None:
    ids = torch.zeros((5, 24), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    by_batch = trainatomy.predict(WORKLOAD, batch=batch, timed=False)
    described = WORKLOAD.replace({"train.per_device_train_batch_size": 5, "data.sequence_length": 24})
    assert by_batch.memory == trainatomy.predict(described, timed=False).memory
    assert by_batch.workload["train"] == {"per_device_train_batch_size": 5, "fp16": True}
    by_function = trainatomy.predict(
        WORKLOAD, batch=lambda size: dict.fromkeys(batch, ids[:size]), per_device_train_batch_size=5, timed=False
    )
    assert by_function.memory == by_batch.memory
    with pytest.raises(WorkloadError, match="per_device_train_batch_size=4, but the batch holds 5 samples"):
        trainatomy.predict(WORKLOAD, batch=batch, per_device_train_batch_size=4)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_live_module_takes_every_key_at_the_top_of_a_workload() -> None:
    batch = {"x": torch.zeros(4, 64)}
    alone, sharded, averaged = (
        trainatomy.predict(Deep(), batch=batch, timed=False, **more).memory.components
        for more in ({}, {"parallel": {"gpus": 4, "strategy": "fsdp2"}}, {"ema_decay": 0.9, "steps": 3})
    )
    weights = 4 * (64 * 64 * 4 + 512)
    assert alone.weights == weights and averaged.weights == 2 * weights
    assert sharded.weights < weights and sharded.optimizer_states < alone.optimizer_states
    with pytest.raises(WorkloadError, match=r"train.gpus: unknown key here; it belongs under `parallel`"):
        trainatomy.predict(Deep(), batch=batch, gpus=4)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("gpt2", {}, "Workload.from_mapping"),
        ("w.yaml", {}, "read_workload"),
        (nn.Linear, {}, r"the class Linear, not a module: pass an instance"),
        (3, {}, "not a int"),
        (
            WORKLOAD,
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)},
            r"Pass its class \(optimizer=torch.optim.SGD\)",
        ),
        (WORKLOAD, {"bf61": True}, "train.bf61: unknown key; did you mean bf16"),
        (WORKLOAD, {"batch_size": 4}, "did you mean per_device_train_batch_size"),
        (WORKLOAD, {"optimizer": "adamv"}, "train.optim: unknown optimizer"),
        (WORKLOAD, {"batch": 3}, "batch: takes a mapping"),
    ],
)
def test_wrong_arguments_are_explained(what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        trainatomy.predict(what, **options)


def test_compare_ops_and_measure_take_settings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = trainatomy.compare([WORKLOAD], bf16=True).rows[0]
    assert row.workload["train"] == {"per_device_train_batch_size": 2, "bf16": True}
    assert trainatomy.ops(WORKLOAD, bf16=True).workload["train"] == row.workload["train"]
    seen: list[Workload] = []
    monkeypatch.setattr("trainatomy.api.measuring.measure_run", lambda workload, *_: seen.append(workload))
    trainatomy.measure(WORKLOAD, bf16=True)
    assert seen[0].train.bf16
    for function in (trainatomy.ops, trainatomy.measure):
        with pytest.raises(WorkloadError, match="batch: only predict takes one"):
            function(WORKLOAD, batch={})


def test_equal_steps_are_executed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainatomy.simulator.simulate import execute

    executed: list[Workload] = []

    def counting(workload: Workload, *arguments: Any, **options: Any) -> Any:
        executed.append(workload)
        return execute(workload, *arguments, **options)

    monkeypatch.setattr("trainatomy.api.predicting.execute", counting)
    rows = [
        WORKLOAD.replace({"name": name, "gpu": gpu, "allocator": allocator})
        for name, gpu, allocator in [
            ("a", "a100-40gb", ""),
            ("b", "a100-80gb", "expandable_segments:True"),
            ("c", "h100", ""),
            ("d", "a100-80gb", ""),
        ]
    ]
    found = trainatomy.compare(rows)
    assert len(executed) == 1  # one serves all that differ in their GPU and its allocator
    assert [each.name for each in found.predictions] == ["a", "b", "c", "d"]
    for row, prediction in zip(rows, found.predictions, strict=True):
        alone = api.predict(row)
        assert (alone.memory, alone.time, alone.card) == (prediction.memory, prediction.time, prediction.card)


def test_compare_keeps_the_effective_batch_size() -> None:
    rows = [WORKLOAD.replace("train.per_device_train_batch_size", size) for size in (1, 2)]
    found = trainatomy.compare(rows, effective_batch_size=4)
    assert [row.accumulation_steps for row in found.rows] == [4, 2]
