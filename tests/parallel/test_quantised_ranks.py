"""Adapters beside quantised weights on several GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from executed import simulated
from spread import CONFIG, HIDDEN, INNER, LAYERS, collectives, labelled

from trainatomy.api import predict
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.measurement.process.job import Task
from trainatomy.measurement.process.pool import TimeLimit
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from forked_ranks import Ranks

pytest.importorskip("bitsandbytes")
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
EIGHT = {"load_in_8bit": True}


def workload(
    quantization: dict[str, Any], loop: str, train: dict[str, Any] | None = None, dtype: str = "auto", **parallel: Any
) -> Workload:
    model = {
        "class": "LlamaForCausalLM",
        "config": CONFIG,
        "dtype": dtype,
        "quantization": quantization,
        "lora": {"r": 8},
    }
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


@pytest.mark.parametrize(("quantization", "loop"), [(FOUR, "trainer"), (EIGHT, "pytorch")], ids=["4", "8"])
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
        ("trainer", {"fsdp": True, "fsdp_config": {"version": 1}}, {}),
    ],
    ids=["fsdp2", "dp", "tp", "trainer-fsdp1"],
)
def test_other_strategies_are_refused(loop: str, train: dict[str, Any], parallel: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="quantised weights on several GPUs are simulated with DDP, and"):
        predict(workload(FOUR, loop, train, gpus=2, **parallel), timed=False)


PACKED = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER) // 2
"""Bytes of all quantised weights: half a byte each."""
BEST = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}


@pytest.mark.parametrize("storage", ["bfloat16", "uint8"])
def test_fsdp2_shards_weights_that_are_packed_as_floats(storage: str) -> None:
    quantization = {**FOUR, "bnb_4bit_quant_storage": storage}
    alone, shared = (
        simulated(workload(quantization, "trainer", train, gpus=gpus)) for gpus, train in ((1, {}), (2, {"fsdp": True}))
    )
    whole = labelled(alone.trace, "weight")
    assert labelled(alone.trace, "scale") == labelled(shared.trace, "scale") > 0
    kept = 0 if storage == "bfloat16" else PACKED
    assert labelled(shared.trace, "weight") == (whole - kept) // 2 + kept
    assert labelled(shared.trace, "optimizer_state") == pytest.approx(
        labelled(alone.trace, "optimizer_state") / 2, rel=0.01
    )


def test_fsdp1_shards_weights_that_are_packed_as_floats_and_not_cast() -> None:
    quantization = {**FOUR, "bnb_4bit_quant_storage": "bfloat16", "prepare_model_for_kbit_training": False}
    first = {"fsdp": True, "fsdp_config": {"version": 1}}
    alone, shared = (
        simulated(workload(quantization, "trainer", train, "bfloat16", gpus=gpus))
        for gpus, train in ((1, {}), (2, first))
    )
    assert labelled(alone.trace, "scale") == labelled(shared.trace, "scale") > 0
    for label in ("weight", "optimizer_state"):
        assert labelled(shared.trace, label) == pytest.approx(labelled(alone.trace, label) / 2, rel=0.01)
    with pytest.raises(SimulationError, match="Must flatten tensors with uniform dtype"):
        simulated(workload(quantization, "trainer", first, "float32", gpus=2))


@pytest.mark.parametrize(("storage", "kind"), [("bfloat16", "FULL_STATE_DICT"), ("uint8", "SHARDED_STATE_DICT")])
def test_fsdp2_saves_and_loads_adapters_beside_packed_weights(storage: str, kind: str) -> None:
    train = {"fsdp": True, "fsdp_config": {"state_dict_type": kind}, **BEST}
    found = simulated(workload({**FOUR, "bnb_4bit_quant_storage": storage}, "trainer", train, gpus=2))
    assert found.saving is not None and list(found.restored) == ["best"]
    assert sum(found.saving.files.values()) < PACKED, "adapters and their states alone"


def test_whole_files_are_not_loaded_beside_weights_that_stay_whole() -> None:
    """Real ranks raise KeyError for the scales."""
    with pytest.raises(WorkloadError, match="a checkpoint of whole files cannot be loaded: PyTorch finds no weights"):
        workload(FOUR, "trainer", {"fsdp": True, **BEST}, gpus=2)


@pytest.mark.parametrize("version", [1, 2])
def test_real_ranks_hold_half_of_the_packed_weights(two_processes: Ranks, version: int) -> None:
    task = Task("packed", "rank_tasks:packed_weights_on_cpu", {"config": CONFIG, "version": version})
    norms = LAYERS * 2 * HIDDEN * 2 if version == 1 else 0  # beside them in FSDP1's flat parameters
    for answer in two_processes.run(task, TimeLimit(120.0)):
        assert answer.result is not None, answer.log
        assert answer.result["loss"] == pytest.approx(answer.result["loss of whole"], abs=1e-6)
        assert answer.result["packed"] == (PACKED + norms) // 2 and answer.result["scales"] == PACKED * 2 // 64
