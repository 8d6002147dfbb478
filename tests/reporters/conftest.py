"""Result values to report, with round numbers so that sums and shares can be checked by eye."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainatomy.results.fit import Candidate, Change, Fit, FitAcross, GPUOption, Price, Remedy, SearchCounts, Shortage
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import (
    Components,
    Instant,
    Line,
    Memory,
    ModuleActivations,
    OutOfMemoryPoint,
    TimelinePoint,
)
from trainatomy.results.prediction import BytesPerParameter, Fact, GPUSummary, Prediction, Subject
from trainatomy.results.time import Time
from trainatomy.runs import predicting
from trainatomy.workload.schema import Workload

MIB = 1024**2
GIB = 1024**3


@pytest.fixture(autouse=True)
def _predictions_are_made_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict in this process, so that tests can replace parts of it."""
    monkeypatch.setattr(predicting, "MAX_IN_ONE_PROCESS", 10**6)


COMPONENTS = Components(
    weights=1 * GIB,
    optimizer_states=2 * GIB,
    gradients=1 * GIB,
    activations=3 * GIB,
    temporary=256 * MIB,
    functionality=32 * MIB,
    cache=224 * MIB,
    context=512 * MIB,
)


@pytest.fixture
def prediction() -> Prediction:
    """Return a training of 8 GiB that fits a GPU of 16 GiB."""
    allocated = COMPONENTS.total_bytes - COMPONENTS.cache - COMPONENTS.context
    return Prediction(
        name="tiny encoder",
        workload={"model": {"id": "tiny/encoder"}, "train": {"per_device_train_batch_size": 4}},
        card=GPUSummary("v100-16gb", "V100 16 GB (SXM2)", 16 * GIB, (7, 0)),
        fits=True,
        verdict="fits",
        room_bytes=8 * GIB,
        memory=Memory(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=allocated + COMPONENTS.cache,
            device_bytes=COMPONENTS.total_bytes,
            peak_requested_bytes=allocated - 12345,
            model_bytes=1 * GIB,
            components=COMPONENTS,
            lines=(
                Line("weights", "parameters in float32", 768 * MIB, 390),
                Line("weights", "16-bit copies kept by autocast", 256 * MIB, 120),
                Line("functionality", "cuBLAS workspaces", 32 * MIB, 2),
            ),
            peak=Instant(1, "backward", "bert.encoder.layer.23.intermediate", "aten::mm"),
            num_alloc_retries=0,
        ),
        modules=(
            ModuleActivations("bert.encoder.layer.*.attention.self", 2 * GIB, 96),
            ModuleActivations("bert.embeddings", 1 * GIB, 4),
        ),
        bytes_per_parameter=BytesPerParameter(
            parameters=268_435_456,
            trainable_parameters=268_435_456,
            actual=18.3,
            parts={"weights": 4.0, "optimizer_states": 8.0, "gradients": 4.0},
            rule=18.0,
            rule_name="mixed precision with AdamW",
            reasons=("gradients_not_at_peak", "a sentence that an earlier version recorded"),
        ),
        facts=(
            Fact("simulated_steps", "", "computed", "meta tensors", 3, "steps"),
            Fact("allocator", "default settings", "computed", "PyTorch 2.13"),
            Fact("context", "", "assumed", "scaled from an H200 by the number of multiprocessors", 512 * MIB, "bytes"),
            Fact("gpu_memory", "", "measured", "deviceQuery on a GPU of this kind", 16 * GIB, "bytes"),
        ),
        notes=("dropout is drawn from CUDA's generator, as in training",),
        out_of_memory=None,
        timeline=(),
        seconds_taken=2.1,
        versions={"torch": "2.13.0", "transformers": "5.17.0", "trainatomy": "0.1.0"},
        subject=Subject(
            models=("TinyForMaskedLM",),
            mode="training",
            loop="trainer",
            weights_dtype="float32",
            batch_size=4,
            optimizer="adamw_torch_fused",
            attention="sdpa",
            inputs={"input_ids": (128,), "labels": (128,)},
        ),
        leading_notes=("TinyForMaskedLM is the class of the checkpoint",),
    )


@pytest.fixture
def too_big(prediction: Prediction) -> Prediction:
    """Return the same training on a GPU of 6 GiB, where it runs out of memory."""
    point = OutOfMemoryPoint(
        Instant(0, "forward", "bert.encoder.layer.20", "aten::mm"), 128 * MIB, 5 * GIB, 5 * GIB + 200 * MIB
    )
    gpu = GPUSummary("rtx-2060", "RTX 2060 6 GB", 6 * GIB, (7, 5))
    return replace(
        prediction,
        name="too big",
        card=gpu,
        fits=False,
        verdict="does not fit",
        room_bytes=-2 * GIB,
        out_of_memory=point,
    )


@pytest.fixture
def timeline(prediction: Prediction) -> Prediction:
    """Return the same prediction with a timeline of two points."""
    points = (
        TimelinePoint(1, 0, "load", {"weights": 1 * GIB}),
        TimelinePoint(2, 0, "forward", {"weights": 1 * GIB, "activations": 3 * GIB}),
    )
    return replace(prediction, timeline=points)


@pytest.fixture
def measurement(prediction: Prediction) -> Measurement:
    """Return a measurement of the same training, with 1 % more allocated than predicted."""
    return Measurement(
        name=prediction.name,
        workload=prediction.workload,
        status="completed",
        gpu="NVIDIA H200",
        driver="580.159.04",
        versions={"torch": "2.11.0+cu130"},
        date="2026-11-21",
        peak_allocated_bytes=round(prediction.memory.peak_allocated_bytes * 1.01),
        peak_reserved_bytes=prediction.memory.peak_reserved_bytes,
        device_bytes=prediction.memory.device_bytes,
        process_bytes=None,
        nvml_used_bytes=prediction.memory.device_bytes + 600 * MIB,
        idle_bytes=600 * MIB,
        context_bytes=512 * MIB,
        model_bytes=1 * GIB,
        num_alloc_retries=0,
        step_seconds=0.25,
        steps=3,
        message="",
        tape_file=None,
    )


@pytest.fixture
def named(prediction: Prediction) -> Callable[[str, int], Prediction]:
    """Return a function that renames the prediction and changes its activations by some bytes."""

    def make(name: str, more: int) -> Prediction:
        memory = prediction.memory
        components = replace(memory.components, activations=memory.components.activations + more)
        changed = replace(
            memory,
            components=components,
            peak_allocated_bytes=memory.peak_allocated_bytes + more,
            peak_reserved_bytes=memory.peak_reserved_bytes + more,
            device_bytes=memory.device_bytes + more,
        )
        return replace(prediction, name=name, memory=changed, room_bytes=prediction.room_bytes - more)

    return make


@pytest.fixture
def timed() -> Callable[[Prediction, float], Prediction]:
    """Return a function that adds a time to a prediction, for steps of four samples."""

    def make(prediction: Prediction, seconds: float) -> Prediction:
        time = Time(
            step_seconds=seconds, interval_seconds=(0.8 * seconds, 1.5 * seconds), samples_per_second=4 / seconds,
            tokens_per_second=None, bound_by="arithmetic", gpu_seconds=seconds, host_seconds=0.01, phases={},
            flop=10**12, flop_per_second=1e12 / seconds, model_flop_utilisation=0.1, attainable_utilisation=None,
            launches=1000, priced_by="a calibration", host="a host", general_rule_only=(),
        )  # fmt: skip
        return replace(prediction, time=time)

    return make


SEARCHED = {
    "name": "tiny encoder",
    "model": {"id": "google-bert/bert-base-uncased"},
    "data": {"sequence_length": 128},
    "train": {"per_device_train_batch_size": 4, "bf16": True},
    "gpu": "rtx-3090",
}
"""The workload of the search below, with an effective batch size of 16."""

CHECKPOINTING = Change("gradient_checkpointing", "on", {"train.gradient_checkpointing": True})
EXPANDABLE = Change("allocator", "expandable_segments", {"allocator": "expandable_segments:True"})
EIGHT_BIT = Change("optimizer", "adamw_8bit", {"train.optim": "adamw_bnb_8bit"}, "optimizer")
SHORTER = Change("sequence_length", "64", {"data.sequence_length": 64}, "sequence-length")
MakeCandidate = Callable[..., Candidate]


def batch(size: int) -> Change:
    """Return the change to a batch size, with the accumulation that keeps 16 samples a step."""
    settings = {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": 16 // size}
    return Change("batch", str(size), settings)


@pytest.fixture
def candidate(prediction: Prediction, timed: Callable[[Prediction, float], Prediction]) -> MakeCandidate:
    """Return a function that makes a candidate of some GiB and seconds; 16 GiB are the limit."""

    def make(changes: tuple[Change, ...], gib: float, seconds: float) -> Candidate:
        base = Workload.from_mapping(SEARCHED)
        workload = base.replace({key: value for each in changes for key, value in each.settings.items()})
        size, memory = round(gib * GIB), prediction.memory
        components = replace(memory.components, activations=memory.components.activations + size - 8 * GIB)
        memory = replace(memory, components=components, device_bytes=size)
        fits, gpu = gib <= 16, GPUSummary("rtx-3090", "GeForce RTX 3090", 17 * GIB, (8, 6))
        made = replace(prediction, workload=workload.to_mapping(), memory=memory, card=gpu, fits=fits)
        made = timed(replace(made, verdict="fits" if fits else "does not fit", room_bytes=17 * GIB - size), seconds)
        assert made.time is not None
        samples, tokens = 16 / seconds, 16 * (workload.data.sequence_length or 0) / seconds
        time = replace(made.time, samples_per_second=samples, tokens_per_second=tokens)
        return Candidate(changes, workload.to_mapping(), replace(made, time=time), fits)

    return make


@pytest.fixture
def fit(candidate: MakeCandidate) -> Fit:
    """Return a search with a tie, a runner-up with another batch size, and prices of which one does not fit."""
    best = candidate((batch(8),), 12, 0.4)
    tie = candidate((batch(8), EXPANDABLE), 11.5, 0.402)
    given = candidate((batch(4),), 8, 0.5)
    checkpointed = candidate((batch(16), CHECKPOINTING), 10, 0.52)
    large = candidate((batch(16),), 20, 0.38)
    halved, eight = candidate((batch(8), SHORTER), 7, 0.22), candidate((batch(8), EIGHT_BIT), 10, 0.41)
    single = candidate((batch(8), CHECKPOINTING), 9, 0.5)
    prices = (
        Price(CHECKPOINTING, True, single, -3 * GIB, 0.25),
        Price(batch(16), True, large, 8 * GIB, -0.05),
        Price(EIGHT_BIT, False, eight, -2 * GIB, 0.025),
        Price(SHORTER, False, halved, -5 * GIB, 0.1),
        Price(Change("lora", "r16", {}, "lora"), False, error="peft refuses\n  in a line of peft"),
    )
    return Fit(
        name="tiny encoder", workload=Workload.from_mapping(SEARCHED).to_mapping(), gpu=best.prediction.gpu,
        goal="throughput", effective_batch_size=16, headroom=0.0588, usable_bytes=16 * GIB, allowed=("precision",),
        given=given, best=best, candidates=(best, tie, given, checkpointed), too_large=(large,), ties=(tie,),
        prices=prices, shortage=None, maximum=None,
        counts=SearchCounts(space=100, executed=5, too_large=40, slower=30, dominated=24, failed=1, seconds=7.5),
        notes=("few_batch_sizes",),
    )  # fmt: skip


@pytest.fixture
def spread_fit(fit: Fit, candidate: MakeCandidate) -> Fit:
    """Return a search on 8 GPUs, of which 4 are the fastest, with a plan in another tie."""

    def on(gpus: int, strategy: str = "") -> tuple[Change, ...]:
        change = Change("gpus", str(gpus), {"loop": "pytorch", "parallel.gpus": gpus})
        plan = Change("plan", "fsdp2_keep", {"parallel.strategy": "fsdp2", "parallel.reshard_after_forward": False})
        return (change, *([plan] if strategy else []), batch(4))

    best, tie = candidate(on(4, "fsdp2"), 12, 1.45), candidate(on(4), 14, 1.46)
    rows = (candidate(on(1), 20, 1.0), candidate(on(2), 15, 1.1), best, candidate(on(8), 14, 3.05))
    return replace(
        fit, workload=rows[3].workload, best=best, candidates=(best, tie), ties=(tie,), given=rows[3], prices=(),
        by_gpus=rows, too_large=(), notes=("fewer_gpus: 4", "batch_norm"),
    )  # fmt: skip


@pytest.fixture
def nothing_fits(fit: Fit, candidate: MakeCandidate) -> Fit:
    """Return a search in which nothing fits, with a remedy, a change that does not suffice, and a larger GPU."""
    smallest = candidate((batch(1), CHECKPOINTING), 18, 1.0)
    lora = Change("lora", "r16", {"model.lora": {"r": 16}}, "lora")
    remedies = (
        Remedy("changes training", (lora,), candidate((batch(1), CHECKPOINTING, lora), 9, 0.9), -9 * GIB, -0.1),
        Remedy("same training", (EXPANDABLE,), candidate((batch(1), EXPANDABLE), 17.5, 1.0), -GIB // 2, 0.0),
        Remedy("larger GPU", (), replace(smallest, fits=True), 0, None),
    )
    shortage = Shortage(smallest, 16 * GIB, fit.headroom, remedies, 4.0)
    nothing = {"best": None, "candidates": (), "ties": (), "prices": (), "given": None, "notes": ()}
    return replace(fit, too_large=(smallest,), shortage=shortage, **nothing)


@pytest.fixture
def across(fit: Fit, nothing_fits: Fit) -> FitAcross:
    """Return a search on three GPUs: one with a price, one without, one on which nothing fits."""
    fits = (fit, replace(fit, best=fit.candidates[2]), nothing_fits)
    names = ("H100 SXM", "GeForce RTX 3090", "T4")
    gpus = [replace(fit.gpu, id=name.lower().replace(" ", "-"), name=name) for name in names]
    prices = (3.0, None, 0.4)
    options = tuple(GPUOption(*each) for each in zip(gpus, fits, prices, strict=True))
    return FitAcross(fit.name, fit.workload, 16, 0.05, (), options, ("gpu: V100 has no bf16",), 33.0)
