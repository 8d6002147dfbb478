"""A run copies what an earlier run with another optimizer did, and writes what executing it writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import pytest

from trainatomy.api.elsewhere import predict_row
from trainatomy.requests.predicting import PredictRequest
from trainatomy.runs.pools import KEPT_RUNS
from trainatomy.runs.predicting import PredictionPool, prediction_pool, recollections
from trainatomy.simulator import simulation
from trainatomy.simulator.micro_batches import Recollections, RememberedRun
from trainatomy.simulator.repetition import Repetition
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.simulator.watcher import Watcher
from trainatomy.workload import Workload

TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 200}


def described(accumulation: int = 4, loop: str = "trainer", **train: Any) -> Workload:
    return Workload.from_mapping(
        {
            "loop": loop,
            "model": {"class": "BertForMaskedLM", "config": TEXT},
            "data": {"sequence_length": 16},
            "train": {"gradient_accumulation_steps": accumulation, **train},
            "gpu": "h200",
        }
    )


def recalling(workload: Workload, runs: deque[RememberedRun], key: str = "") -> Simulation:
    watch = partial(Watcher, recollections=Recollections(runs, key))
    return simulate(workload, workload.resolve_gpu(), watch=watch)


def executions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the step and the micro-step of each micro-batch that is executed from now on."""
    begun: list[tuple[int, int]] = []
    begin = Repetition.begin

    def noted(self: Repetition, micro_step: int) -> None:
        begun.append((self._recorder.step, micro_step))
        begin(self, micro_step)

    monkeypatch.setattr(Repetition, "begin", noted)
    return begun


@pytest.mark.parametrize(
    ("loop", "accumulation", "expected", "train", "others"),
    [
        ("trainer", 4, [(0, 0)], {"fp16": True}, ["adamw_torch"]),
        ("trainer", 1, [(0, 0)], {}, ["sgd"]),
        ("trainer", 2, [(0, 0)], {}, ["sgd", "adamw_torch"]),
        ("trainer", 2, [(0, 0)], {"fp16": True, "gradient_checkpointing": True}, ["adamw_torch"]),
        ("pytorch", 3, [(0, 0)], {"bf16": True}, ["sgd"]),
        ("trainer", 6, [(0, 0)], {"gradient_checkpointing": True}, ["adafactor"]),
        ("pytorch", 4, [(0, 0)], {"bf16": True}, ["adamw_bnb_8bit"]),
    ],
)
def test_a_recalled_run_is_what_execution_writes(
    loop: str,
    accumulation: int,
    expected: list[tuple[int, int]],
    train: dict[str, Any],
    others: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = deque[RememberedRun](maxlen=KEPT_RUNS)
    recalling(described(accumulation, loop, **train), runs)
    for optim in others:
        workload = described(accumulation, loop, optim=optim, **train)
        executed = simulate(workload, workload.resolve_gpu())
        with monkeypatch.context() as patch:
            begun = executions(patch)
            recalled = recalling(workload, runs)
        assert recalled.trace == executed.trace
        assert recalled.operations == executed.operations
        assert recalled == executed
        assert begun == expected


@pytest.mark.parametrize(("setting", "value"), [("train.per_device_train_batch_size", 3), ("model.dtype", "bfloat16")])
def test_a_run_that_begins_differently_is_executed(
    setting: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = deque[RememberedRun](maxlen=KEPT_RUNS)
    recalling(described(optim="sgd"), runs)
    other = described(optim="sgd").replace(setting, value)
    executed = simulate(other, other.resolve_gpu())
    begun = executions(monkeypatch)
    assert recalling(other, runs) == executed
    assert begun == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_the_runs_that_were_used_last_are_kept() -> None:
    runs = deque[RememberedRun](maxlen=KEPT_RUNS)
    for number in range(KEPT_RUNS):
        recalling(described(1, "pytorch"), runs, str(number))
    recalling(described(1, "pytorch"), runs, "0")
    recalling(described(1, "pytorch"), runs, "new")
    assert [run.key for run in runs] == [*map(str, range(2, KEPT_RUNS)), "0", "new"]


@pytest.mark.parametrize(
    ("setting", "value", "is_shared"),
    [
        ("train.optim", "adafactor", True),
        ("train.optim_args", "foreach=False", True),
        ("model.dtype", "float32", True),
        ("allocator", "expandable_segments:True", True),
        ("train.per_device_train_batch_size", 4, False),
        ("train.torch_empty_cache_steps", 1, False),
        ("train.gradient_checkpointing", True, False),
        ("train.fp16", True, False),
        ("data.sequence_length", 32, False),
    ],
)
def test_only_the_optimizer_and_the_allocator_may_differ(setting: str, value: object, is_shared: bool) -> None:
    def key(workload: Workload) -> str:
        known = recollections(workload)
        assert known is not None
        return known[1]

    workload = described()
    with prediction_pool(lambda workload: None, 1):  # type: ignore[arg-type, return-value]
        assert (key(workload) == key(workload.replace(setting, value))) is is_shared


@pytest.mark.parametrize(
    ("setting", "value"), [("train.optim", "galore_adamw_layerwise"), ("train.optim", "torch.optim.Adagrad")]
)
def test_an_optimizer_that_may_take_part_in_a_micro_batch_is_executed(setting: str, value: object) -> None:
    with prediction_pool(lambda workload: None, 1) as pool:  # type: ignore[arg-type, return-value]
        assert isinstance(pool, PredictionPool)
        assert recollections(described().replace(setting, value)) is None
    assert recollections(described()) is None


@pytest.mark.parametrize(("layouts", "expected"), [(True, 1), ("scarce", 1), (False, 0)])
def test_only_a_search_leaves_out_what_follows_the_executed_steps(
    monkeypatch: pytest.MonkeyPatch, layouts: bool | Literal["scarce"], expected: int
) -> None:
    """A comparison by several processes, which remember runs, says what one prediction does."""
    continued: list[Any] = []
    monkeypatch.setattr(simulation, "with_further_steps", lambda trace, _: continued.append(trace) or trace)
    with prediction_pool(partial(predict_row, PredictRequest(layouts=layouts)), 1) as pool:
        pool.submit(described()).result()
    assert len(continued) == expected
