from __future__ import annotations

from importlib import import_module
from typing import get_args

import pytest

from trainatomy.catalog.machines import reference_host
from trainatomy.errors import WorkloadError
from trainatomy.workload.loops import LOOPS, LoopName, loop_of
from trainatomy.workload.schema import Workload

MODEL = {"model": {"class": "BertForMaskedLM"}}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_can_be_imported_and_has_cpu_costs(name: str) -> None:
    loop = LOOPS[name]
    for library in loop.libraries:
        pytest.importorskip(library)
    for module in loop.imports:
        import_module(module)
    assert callable(loop.function())
    costs = reference_host().microseconds
    assert all(loop.cpu_costs in costs[part] for part in ("step", "micro_step", "parameter_step", "sample"))


def test_the_schema_takes_the_names_of_the_loops_that_train() -> None:
    assert get_args(LoopName) == tuple(loop.name for loop in LOOPS.values() if loop.trains)


def test_the_mode_decides_before_the_loop() -> None:
    assert loop_of(Workload.from_mapping(MODEL)).name == "trainer"
    assert loop_of(Workload.from_mapping({**MODEL, "loop": "pytorch"})).name == "pytorch"
    assert loop_of(Workload.from_mapping({**MODEL, "loop": "pytorch", "mode": "inference"})).name == "inference"


def test_only_loops_that_train_are_values_of_the_key() -> None:
    with pytest.raises(WorkloadError, match="loop"):
        Workload.from_mapping({**MODEL, "loop": "inference"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neftune_noise_alpha", 5.0),
        ("label_smoothing_factor", 0.1),
        ("torch_empty_cache_steps", 4),
        ("average_tokens_across_devices", False),
        ("logging_nan_inf_filter", False),
        ("include_num_input_tokens_seen", "all"),
    ],
)
def test_settings_that_a_plain_loop_cannot_apply_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(WorkloadError, match=f"train.{name}"):
        Workload.from_mapping({**MODEL, "loop": "pytorch", "train": {name: value}})
    Workload.from_mapping({**MODEL, "train": {name: value}})


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("SFTTrainer", "sft"),
        ("trl.SFTTrainer", "sft"),
        ("sft_trainer", "sft"),
        ("KTOTrainer", "kto"),
        ("trl.RewardTrainer", "reward"),
    ],
)
def test_the_trainers_of_trl_are_named_by_their_loops(name: str, loop: str) -> None:
    with pytest.raises(WorkloadError, match=rf"loop: must be 'trainer', .*: write loop: {loop}"):
        Workload.from_mapping({**MODEL, "loop": name})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("PPOTrainer", "PPO also generates"),
        ("trl.ORPOTrainer", "ORPO runs"),
        ("rloo", "RLOO"),
    ],
)
def test_trainers_that_are_not_run_are_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(WorkloadError, match=rf"loop: must be .*: TRL's trainer is not run; {why}"):
        Workload.from_mapping({**MODEL, "loop": name})


def test_other_unknown_loops_are_refused_as_before() -> None:
    with pytest.raises(WorkloadError, match=r"loop: must be 'trainer', .*, found 'trainr'; did you mean trainer"):
        Workload.from_mapping({**MODEL, "loop": "trainr"})
