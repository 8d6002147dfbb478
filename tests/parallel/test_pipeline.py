"""Pipelines: stages, PyTorch's schedules in each rank, and the time of a step."""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from executed import simulated
from spread import CONFIG, HIDDEN, INNER, VOCABULARY, collectives, labelled, shards_embeddings, weight_bytes
from spread import workload as described

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.prediction.pipeline import pipeline_prediction, ranks_alike
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.prediction import GroupUse
from trainatomy.results.time import Work
from trainatomy.timing.pipeline import StageSeconds, schedule
from trainatomy.training.parallel.pipeline import layers_by_stage, order_of_work, stages_of
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.schema import Workload

TINY = {
    "num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 40, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
ROWS, LENGTH = 2, 64
HIDDEN_BYTES = LENGTH * HIDDEN * 4
"""Bytes of the hidden states of one sample."""
RECEIVES_ALLOCATE = find_spec("torch.distributed.pipelining._recv_buffers") is not None
"""Since torch 2.15 a buffer is allocated for each message that is received, and sent gradients are held to the end."""


def workload(layers: int = 4, train: dict[str, Any] | None = None, **parallel: Any) -> Workload:
    made = described(
        train={"per_device_train_batch_size": ROWS, **(train or {})}, **{"gpus": 2, "pp_size": 2, **parallel}
    )
    return made.replace("model.config", {**CONFIG, "num_hidden_layers": layers})


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Qwen3", "Gemma2"])
def test_stages_compute_what_the_model_computes(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**TINY)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(0, 40, (2, 6))
    expected = model(ids).logits
    if family == "Gemma2":  # the last operation of its head is outside of the layers: a soft limit for logits
        expected = model.lm_head(model.model(ids).last_hidden_state)
    given = ids
    for index in range(3):
        (stage,) = stages_of(copy.deepcopy(model), [index], 3)
        given = stage(given)
    torch.testing.assert_close(given, expected)


def test_a_rank_keeps_the_parameters_of_its_stages_alone() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    total = {name: parameter.shape for name, parameter in model.named_parameters()}
    parts = [copy.deepcopy(model) for _ in range(2)]
    for rank, part in enumerate(parts):
        stages_of(part, [rank, rank + 2], 4)
    kept = [{name: parameter.shape for name, parameter in part.named_parameters()} for part in parts]
    assert kept[0] | kept[1] == total
    assert not set(kept[0]) & set(kept[1])
    assert "model.embed_tokens.weight" in kept[0]
    assert {"model.norm.weight", "lm_head.weight"} < set(kept[1])


def test_the_first_stages_have_the_layers_that_are_left() -> None:
    assert layers_by_stage(10, 4) == [3, 3, 2, 2]


SCHEDULES = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_work_in_the_order_that_the_time_is_computed_from(name: str, rank: int) -> None:
    found = simulated(workload(pp_schedule=name), rank)
    per_rank = 2 if name not in ("GPipe", "1F1B") else 1
    assert [run.work for run in found.operations.stage_runs] == order_of_work(name, 2, per_rank, ROWS)[rank]


def test_stages_exchange_hidden_states_and_their_gradients() -> None:
    first, last = (collectives(simulated(workload(), rank)) for rank in (0, 1))
    message = [("nccl::send", HIDDEN_BYTES)] * ROWS, [("nccl::recv", HIDDEN_BYTES)] * ROWS
    for found in (first, last):
        assert [one for one in found if one[0] == "nccl::send"] == message[0]
        assert [one for one in found if one[0] == "nccl::recv"] == message[1]
        assert found[-1][0] == "nccl::all_reduce"  # the norm of all gradients


def test_each_rank_holds_its_share_and_a_buffer_for_each_message() -> None:
    ranks = [simulated(workload(), rank) for rank in (0, 1)]
    weights = [labelled(found.trace, "weight") for found in ranks]
    assert sum(weights) == weight_bytes(ranks[0])
    assert [labelled(found.trace, "optimizer_state") for found in ranks] == pytest.approx(
        [2 * each for each in weights], rel=0.01
    )
    assert labelled(ranks[0].trace, "communication_buffer") == (1 if RECEIVES_ALLOCATE else ROWS) * HIDDEN_BYTES


def test_messages_that_were_sent_are_not_held_before_torch_2_15() -> None:
    train = {"per_device_train_batch_size": 8}
    trace = simulated(workload(train=train, pp_schedule="Interleaved1F1B", pp_microbatches=8), 1).trace
    alive: set[int] = set()
    most = 0
    for event in trace.events:
        origin = trace.origins[event.allocation]
        if event.action == "alloc" and event.bytes == HIDDEN_BYTES and origin.phase == "backward":
            alive.add(event.allocation)
        elif event.action == "free":
            alive.discard(event.allocation)
        most = max(most, len(alive))
    assert (most >= 16) if RECEIVES_ALLOCATE else (most < 8)  # two stages send eight gradients each


def test_a_rank_of_1f1b_holds_fewer_micro_batches_than_one_of_gpipe() -> None:
    four = {"per_device_train_batch_size": 4}
    of = {name: predict(workload(train=four, pp_schedule=name), timed=False, ranks=[1]) for name in ("GPipe", "1F1B")}
    held = {name: [rank.memory.components.activations for rank in found.ranks.values()] for name, found in of.items()}
    # Two micro-batches are in flight in the first rank, one in the last, instead of all four.
    assert held["1F1B"][0] < 0.7 * held["GPipe"][0]
    assert held["1F1B"][1] < 0.4 * held["GPipe"][1]


@pytest.mark.parametrize(("torch", "pairs"), [("2.13", {(0, 1), (1, 2)}), ("2.11", set())])
def test_messages_outside_of_batches_have_communicators_of_pairs(torch: str, pairs: set[tuple[int, ...]]) -> None:
    three = {"per_device_train_batch_size": 3}
    once, together = (
        simulated(
            workload(train=three, gpus=3, pp_size=3, pp_schedule=name).replace("software.torch", torch), 1
        ).communicators
        for name in ("GPipe", "1F1B")
    )
    assert set(once) == set(together) == pairs | {(0, 1, 2)}
    gpipe, one_f_one_b = ({use.peer for use in found[0, 1, 2] if use.kind == "send"} for found in (once, together))
    assert gpipe == (set() if pairs else {0, 2})
    assert one_f_one_b


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_of_a_stage_share_data(strategy: str) -> None:
    found = simulated(workload(gpus=4, strategy=strategy), 3)
    assert set(found.communicators) == {(1, 3), (2, 3)}
    assert GroupUse("send", 1) in found.communicators[1, 3]
    shards = 2 if strategy == "fsdp2" else 1
    alone = simulated(workload(), 1)
    assert labelled(found.trace, "weight") == pytest.approx(labelled(alone.trace, "weight") / shards, rel=0.01)
    reduced = [size for name, size in collectives(found) if name in ("nccl::all_reduce", "nccl::reduce_scatter")]
    assert sum(reduced) == pytest.approx(labelled(alone.trace, "weight"), rel=0.01)


def of_stages(layers: int, ranks: int) -> tuple[int, int]:
    """Bytes of weights of a rank in each of two stages, of which ``ranks`` ranks share the matrices."""
    norm, matrices = HIDDEN, 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    table = VOCABULARY * HIDDEN
    stage = layers // 2 * (matrices // ranks + 2 * norm)
    return 4 * (stage + (table // ranks if shards_embeddings() else table)), 4 * (stage + norm + table // ranks)


@pytest.mark.parametrize(("ranks", "sequences"), [(1, False), (4, True)])
def test_ranks_of_a_stage_share_its_matrices(ranks: int, sequences: bool) -> None:
    made = workload(gpus=2 * ranks, tp_size=ranks, sequence_parallel=sequences)
    made = made.replace({"model.config.num_hidden_layers": 2})
    for stage, expected in enumerate(of_stages(2, ranks)):
        for rank in {stage * ranks, stage * ranks + ranks - 1}:
            trace = simulated(made, rank).trace
            assert labelled(trace, "weight") == pytest.approx(expected, rel=0.001)  # and a buffer of the positions
            # DTensor's backward of an embedding yields the whole gradient, also where the weights are sharded.
            whole = 4 * VOCABULARY * HIDDEN * (ranks - 1) // ranks if stage == 0 and shards_embeddings() else 0
            assert labelled(trace, "gradient") == expected + whole
            assert labelled(trace, "optimizer_state") == pytest.approx(2 * expected, rel=0.01)


def test_parameters_of_all_ranks_are_those_of_the_model() -> None:
    made = workload(layers=2, gpus=4, tp_size=2)
    held = [labelled(simulated(made, rank).trace, "gradient") for rank in range(4)]
    # Both ranks of a stage hold its norms, those of the first one the gradient of the embeddings too.
    twice = 4 * (5 * HIDDEN + VOCABULARY * HIDDEN)
    assert sum(held) == weight_bytes(simulated(made)) + twice


@pytest.mark.parametrize("sequences", [False, True])
def test_stages_send_to_the_same_rank_of_the_next_one(sequences: bool) -> None:
    made = workload(gpus=4, tp_size=2, sequence_parallel=sequences)
    message = HIDDEN_BYTES // (2 if sequences else 1)
    for rank, pair, sharing in [(0, (0, 2), (0, 1)), (3, (1, 3), (2, 3))]:
        found = simulated(made, rank)
        assert [size for name, size in collectives(found) if name == "nccl::send"] == [message] * ROWS
        assert set(found.communicators) == {pair, sharing}
        other = sum(pair) - rank
        assert {GroupUse("send", other), GroupUse("recv", other)} <= found.communicators[pair]
        assert all(use.peer is None for use in found.communicators[sharing])


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble"])
def test_matrices_are_shared_with_every_schedule(name: str) -> None:
    made = workload(gpus=4, tp_size=2, pp_schedule=name)
    per_rank = 1 if name == "1F1B" else 2
    alone, shared = simulated(workload(pp_schedule=name), 1), simulated(made, 2)
    assert [run.work for run in shared.operations.stage_runs] == order_of_work(name, 2, per_rank, ROWS)[1]
    reduced = [size for kind, size in collectives(shared) if (kind, size) == ("nccl::all_reduce", HIDDEN_BYTES)]
    # Of each sample and layer, the outputs of attention and MLP and the gradients of q, k, v, gate and up; the head's.
    assert len(reduced) == ROWS * (2 * (2 + 5) + 1)
    assert not [kind for kind, size in collectives(alone) if (kind, size) == ("nccl::all_reduce", HIDDEN_BYTES)]


def test_fsdp_shards_what_is_left_of_the_matrices() -> None:
    found = simulated(workload(gpus=8, tp_size=2, strategy="fsdp2"), 7)
    assert set(found.communicators) == {(3, 7), (5, 7), (6, 7)}
    assert labelled(found.trace, "weight") == pytest.approx(of_stages(4, 2)[1] / 2, rel=0.001)
    assert labelled(found.trace, "optimizer_state") == pytest.approx(of_stages(4, 2)[1], rel=0.01)


def test_shared_matrices_are_reduced_again_where_layers_are_recomputed() -> None:
    train = {"gradient_checkpointing": True}
    plain, saved = (simulated(workload(gpus=4, tp_size=2, train=given), 2) for given in ({}, train))
    of = [[one for one in collectives(found) if one == ("nccl::all_reduce", HIDDEN_BYTES)] for found in (plain, saved)]
    assert len(of[1]) - len(of[0]) == ROWS * 2  # behind attention; recomputation ends before the sum behind the MLP


def test_fsdp_wraps_the_classes_that_are_named_in_a_stage() -> None:
    made = workload(gpus=4, strategy="fsdp2", transformer_layer_cls_to_wrap=["LlamaMLP"])
    gathered = [size for name, size in collectives(simulated(made)) if name == "nccl::all_gather"]
    assert 3 * HIDDEN * INNER * 4 in gathered


def test_checkpointing_and_autocast_run_in_stages() -> None:
    plain, saved = (simulated(workload(train={"bf16": True, "gradient_checkpointing": on}), 1) for on in (False, True))
    assert any(one.phase == "recompute" for one in saved.operations.operations)
    assert not any(one.phase == "recompute" for one in plain.operations.operations)


# -- time --------------------------------------------------------------------------------------------------------------


def seconds(forward: float, backward: float, ranks: int, micro_batches: int, stages: int = 1) -> list[StageSeconds]:
    work = {
        (kind, stage, number): taken
        for kind, taken in (("forward", forward), ("backward", backward))
        for stage in range(stages)
        for number in range(micro_batches)
    }
    return [StageSeconds(0.0, work, 0.0) for _ in range(ranks)]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 8)])
def test_the_bubble_of_equal_stages_is_the_textbook_one(name: str, ranks: int, micro_batches: int) -> None:
    order = order_of_work(name, ranks, 1, micro_batches)
    found = schedule(order, seconds(1.0, 2.0, ranks, micro_batches), lambda *_: 0.0, together=True)
    assert found.step == 3.0 * (micro_batches + ranks - 1)
    assert found.bubble_share == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_a_step_is_predicted_for_slower_hosts_too() -> None:
    time = predict(workload(), host_paces=(1.0, 2.0)).time
    assert time is not None
    same, slower = time.at_paces
    assert same.step_seconds == time.step_seconds
    assert 1.5 < slower.step_seconds / time.step_seconds < 2.1  # the CPU bounds so small a model


def test_interleaved_stages_divide_the_bubble() -> None:
    order = order_of_work("Interleaved1F1B", 4, 2, 8)
    found = schedule(order, seconds(0.5, 1.0, 4, 8, stages=2), lambda *_: 0.0, together=True)
    assert found.step == 3.0 * 8 + 3.0 * 3 / 2


def test_the_slowest_stage_sets_the_pace_and_messages_delay_the_others() -> None:
    slow, fast = seconds(2.0, 4.0, 1, 8)[0], seconds(1.0, 2.0, 1, 8)[0]
    order = order_of_work("1F1B", 2, 1, 8)
    found = schedule(order, [fast, slow], lambda *_: 0.25, together=True)
    assert found.step == 1.0 + 0.25 + 8 * 6.0 + 0.25 + 2.0


def test_ranks_meet_to_clip_gradients() -> None:
    order = order_of_work("GPipe", 2, 1, 1)
    work = {("forward", 0, 0): 1.0, ("backward", 0, 0): 2.0}
    ranks = [StageSeconds(0.0, work, 1.0), StageSeconds(0.0, work, 5.0)]
    assert schedule(order, ranks, lambda *_: 0.0, together=True).step == 5.0 + 3.0 + 2.0
    # Without clipping, the last rank updates its weights while the first one computes its last gradients.
    assert schedule(order, ranks, lambda *_: 0.0, together=False).step == 2.0 + 1.0 + 5.0


def test_a_schedule_that_cannot_go_on_is_an_error() -> None:
    order = [[Work("forward", 0, 0)], [Work("backward", 1, 0), Work("forward", 1, 1)]]
    with pytest.raises(ValueError, match="cannot go on"):
        schedule(order, seconds(1.0, 1.0, 2, 2), lambda *_: 0.0, together=True)


# -- prediction --------------------------------------------------------------------------------------------------------


def test_only_distinct_ranks_are_executed() -> None:
    parallel = ParallelSpec(gpus=8, pp_size=8)
    assert ranks_alike(parallel, 16) == [0, 1, 1, 1, 1, 1, 1, 7]
    assert ranks_alike(parallel, 10) == [0, 1, 2, 2, 2, 2, 2, 7]
    assert ranks_alike(ParallelSpec(gpus=4, pp_size=4, pp_stages_per_rank=2), 8) == [0, 1, 1, 3]


def test_the_fullest_rank_is_billed_and_the_others_are_listed() -> None:
    found = predict(workload(train={"per_device_train_batch_size": 6}, gpus=3, pp_size=3, pp_schedule="GPipe"))
    assert list(found.ranks) == [0, 1, 2]
    assert found.memory.device_bytes == max(rank.memory.device_bytes for rank in found.ranks.values())
    assert found.rank == 1  # with a neighbour on each side, NCCL has most buffers
    assert found.time is not None and found.time.pipeline is not None
    pipeline = found.time.pipeline
    assert (pipeline.schedule, pipeline.stages, pipeline.micro_batches) == ("GPipe", 3, 6)
    assert found.time.step_seconds == pipeline.step_seconds > max(pipeline.rank_seconds)
    assert 0 < pipeline.bubble_share < 1
    shared = found.time.communication
    assert shared is not None and 0 <= shared.scaling_efficiency <= 1 - pipeline.bubble_share
    assert found.time.samples_per_second == pytest.approx(6 / pipeline.step_seconds)


def test_the_first_rank_of_each_stage_is_executed() -> None:
    found = predict(workload(train={"per_device_train_batch_size": 4}, gpus=16, pp_size=4, tp_size=2, strategy="fsdp2"))
    assert list(found.ranks) == [0, 4, 12]
    assert [note for note in found.notes if note.startswith("rank 8: layers as in rank 4")]
    assert found.time is not None and found.time.pipeline is not None
    assert len(found.time.pipeline.rank_seconds) == 4
    assert found.time.communication is not None
    rate = found.time.communication.total_samples_per_second
    assert rate == pytest.approx(2 * 4 / found.time.pipeline.step_seconds)


def test_ranks_that_are_asked_for_are_listed_beside_rank_0() -> None:
    found = predict(workload(train={"per_device_train_batch_size": 4}, gpus=4, pp_size=4), timed=False, ranks=[2])
    assert (found.rank, list(found.ranks)) == (0, [0, 1, 2, 3])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "key", "message"),
    [
        ({"pp_microbatches": 3}, "parallel.pp_microbatches", "3 does not divide the batch of 2 samples"),
        ({"pp_microbatches": 1}, "parallel.pp_microbatches", "1F1B needs at least as many micro-batches as stages"),
        ({"pp_schedule": "GPipe", "pp_stages_per_rank": 2}, "parallel.pp_stages_per_rank", "is 1 with GPipe"),
        ({"pp_schedule": "LoopedBFS", "pp_stages_per_rank": 1}, "parallel.pp_stages_per_rank", "at least 2"),
        ({"pp_schedule": "DualPipeV"}, "parallel.pp_schedule", "Interleaved1F1B"),
        ({"gpus": 8, "tp_size": 2, "strategy": "ddp"}, "parallel.tp_size", "DDP does not take sharded parameters"),
        ({"gpus": 4, "tp_size": 2, "enable_expert_parallel": True}, "parallel.enable_expert_parallel", "a pipeline"),
        (
            {"gpus": 8, "tp_size": 2, "cp_size": 2, "strategy": "fsdp2"},
            "parallel.pp_size",
            "is not simulated with parallel.cp_size",
        ),
        ({"gpus": 4, "pp_schedule": "InterleavedZeroBubble"}, "parallel.pp_schedule", "does not reduce all gradients"),
        (
            {"pp_schedule": "InterleavedZeroBubble", "strategy": "fsdp2"},
            "parallel.pp_schedule",
            "does not reduce all gradients",
        ),
        ({"gpus": 4, "sync_each_batch": True}, "parallel.sync_each_batch", "after the last micro-batch"),
        ({"gpus": 4, "strategy": "zero1"}, "parallel.strategy", "ddp or fsdp2"),
        ({"pp_size": 1, "pp_microbatches": 2}, "parallel.pp_microbatches", "belongs to a pipeline"),
        ({"train": {"gradient_accumulation_steps": 2}}, "train.gradient_accumulation_steps", "pp_microbatches"),
        ({"train": {"fp16": True}}, "train.fp16", "bf16"),
    ],
)
def test_what_no_pipeline_can_run_is_refused_by_its_key(parallel: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        workload(**parallel)
    assert key in str(caught.value)


def test_the_trainer_runs_no_pipeline() -> None:
    with pytest.raises(WorkloadError, match="the Trainer runs no pipelines"):
        described("trainer", gpus=2, pp_size=2, train={"per_device_train_batch_size": 2})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"class": "LlamaForCausalLM", "config": {**CONFIG, "num_hidden_layers": 1}}, "too few for 2 stages"),
        ({"class": "LlamaForCausalLM", "config": {**CONFIG, "tie_word_embeddings": True}}, "tie_word_embeddings"),
        ({"class": "GPT2LMHeadModel", "config": {"n_layer": 2, "n_embd": 64, "n_head": 2}}, "base_model_pp_plan"),
        ({"class": "T5ForConditionalGeneration", "config": {"num_layers": 2, "d_model": 64}}, "encoder and a decoder"),
    ],
    ids=lambda one: one["class"] if isinstance(one, dict) else "",
)
def test_models_that_cannot_be_divided_are_named(model: dict[str, Any], message: str) -> None:
    given = workload().to_mapping() | {"model": model}
    with pytest.raises(WorkloadError, match=message):
        predict(Workload.from_mapping(given), timed=False)


def test_a_function_that_returns_batches_saves_a_pipeline_collating_them() -> None:
    made = workload()
    seconds = []
    for changed in (made, made.replace("data.factory", "own.py:batch")):
        found = pipeline_prediction(
            changed,
            partial(simulated, made),  # the operations are the same
            PredictRequest(ranks=(0,)),
            started=0.0,
        )
        assert found.time is not None
        seconds.append(found.time.step_seconds)
    assert seconds[1] < seconds[0]
