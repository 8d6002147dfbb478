"""Changes that move the peak to another phase: where anything fits, the search finds one as fast as the fastest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pretender import GIB, TINY, Phased, Pretender

from trainatomy.requests.fitting import FitRequest
from trainatomy.results.fit import Fit, Permission
from trainatomy.results.prediction import Plan, Prediction
from trainatomy.search.run import run
from trainatomy.search.space import space_of
from trainatomy.workload.schema import Workload

KEPT = ("optimizer_implementation", "torch_empty_cache_steps", "allocator")
"""Axes that are left out, so that whole spaces are small."""
ALLOWED: tuple[tuple[Permission, ...], ...] = (
    ("lora",),
    ("lora", "quantization"),
    ("lora", "sequence-length"),
    ("lora", "optimizer", "quantization"),
)
GIVEN: tuple[dict[str, object], ...] = (
    {},
    {"train.gradient_checkpointing": True},
    {"model.lora": {"r": 8}},
    {"train.optim": "sgd", "train.gradient_checkpointing": True},
)
"""Trainings as they are given."""
NOTICEABLE_BYTES = 16 * 2**20
"""Memory that an option must save to count as one that saves memory."""


@cache
def whole_space(start: int, allow: tuple[Permission, ...]) -> tuple[Workload, ...]:
    """Return the workload of every candidate."""
    space = space_of(Workload.from_mapping(TINY).replace(GIVEN[start]), FitRequest(8, allow=allow, keep=KEPT))
    return tuple(map(space.workload_at, space.points({axis.name: space.options(axis) for axis in space.axes})))


def searched(pretender: Pretender, memory: float, start: int, allow: tuple[Permission, ...]) -> Fit:
    gpu = {"base": "rtx-3090", "memory_bytes": round(memory * GIB)}
    limited = Workload.from_mapping(TINY).replace({**GIVEN[start], "gpu": gpu})
    return run(limited, "throughput", FitRequest(8, allow=allow, keep=KEPT, prices=False), pretender)


def fastest(found: Fit) -> float:
    """Return the seconds for each token of a sample."""
    times = (each.prediction.time for each in found.candidates)
    return min(8 / time.tokens_per_second for time in times if time is not None and time.tokens_per_second)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    share=st.floats(0, 1),
    start=st.integers(0, len(GIVEN) - 1),
    allow=st.sampled_from(ALLOWED),
    weights=st.floats(1, 15),
    sample=st.floats(0.05, 10),
    logits=st.floats(0, 3),
    adapted=st.floats(0.3, 1),
    kept=st.floats(0.05, 0.5),
    gathered=st.sampled_from([0.0, 10.0, 40.0]),
    recompute=st.floats(0.1, 0.4),
    eager=st.floats(-0.1, 0.4),
    launch=st.floats(0, 0.05),
)
@example(  # 8B in bf16 at 4,096 tokens with LoRA on 24 GiB: only checkpointing with adapters fits
    share=0.4, start=0, allow=("lora",), weights=14.0, sample=12.0, logits=2.0, adapted=0.8, kept=0.05,
    gathered=0.0, recompute=0.3, eager=0.1, launch=0.01,
)  # fmt: skip
def test_what_fits_is_found_whatever_phase_has_the_peak(
    some_prediction: Prediction, share: float, start: int, allow: tuple[Permission, ...], **changes: float
) -> None:
    model = Phased(**changes)
    needed = [model.needed(workload) for workload in whole_space(start, allow)]
    least, most = min(size for size, _ in needed), max(size for size, _ in needed)
    memory = (least + share * (most - least)) / 0.95 + 0.01
    pretender = Pretender(some_prediction, model)
    found = searched(pretender, memory, start, allow)
    assert found.best is not None, "the least fits"
    fitting = [seconds for size, seconds in needed if size * GIB <= found.usable_bytes - NOTICEABLE_BYTES]
    assert not fitting or fastest(found) <= min(fitting) * 1.02
    assert len(pretender.asked) <= 50


@pytest.mark.parametrize("allow", ALLOWED)
@pytest.mark.parametrize("start", range(len(GIVEN)))
def test_the_smallest_of_which_nothing_fits_is_the_smallest(
    some_prediction: Prediction, start: int, allow: tuple[Permission, ...]
) -> None:
    model = Phased(weights=14.0, sample=10.0, logits=2.0)
    least = min(model.needed(workload)[0] for workload in whole_space(start, allow))
    found = searched(Pretender(some_prediction, model), 0.9 * least, start, allow)
    assert found.best is None and found.shortage is not None
    assert found.shortage.given.device_bytes == pytest.approx(least * GIB, rel=1e-3)
    smaller = [each for each in found.shortage.remedies if each.kind == "changes training" and each.candidate.fits]
    assert not any({change.permission for change in each.changes} <= {"", *allow} for each in smaller)


@dataclass
class Sharded(Phased):
    """A training on several GPUs: FSDP2 shards all states and gathers weights, ZeRO-1 shards those of the optimizer."""

    gather: float = 0.1

    def held(self, workload: Workload) -> tuple[list[tuple[str, dict[str, float]]], float, float]:
        phases, cache, seconds = super().held(workload)
        plan = Plan.of(workload.to_mapping())
        sharded = {"fsdp2": ("weights", "optimizer_states", "gradients"), "zero1": ("optimizer_states",)}
        parts = sharded.get(plan.strategy, ())
        kept = workload.parallel.reshard_after_forward is False
        gathered = {"gathered_weights": self.weights * (1.0 if kept else 0.1)} if plan.strategy == "fsdp2" else {}

        def share(sizes: dict[str, float]) -> dict[str, float]:
            return {part: size / (plan.world_size if part in parts else 1) for part, size in sizes.items()} | gathered

        slower = self.gather * (0.5 if kept else 1.0) if gathered else 0.0
        return [(phase, share(sizes)) for phase, sizes in phases], cache, seconds * (1 + slower)


@pytest.mark.parametrize("allow", [(), ("lora",), ("optimizer",), ("lora", "optimizer")])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("sample", [0.5, 8.0])
def test_what_fits_on_several_gpus_is_found(
    some_prediction: Prediction, allow: tuple[Permission, ...], share: float, sample: float
) -> None:
    model = Sharded(weights=14.0, sample=sample, logits=0.5)
    given = Workload.from_mapping({**TINY, "loop": "pytorch", "parallel": {"gpus": 4}})
    options = FitRequest(32, allow=allow, keep=(*KEPT, "gpus"), prices=False)
    space = space_of(given, options)
    points = space.points({axis.name: space.options(axis) for axis in space.axes})
    needed = [model.needed(space.workload_at(point)) for point in points]
    least, most = min(size for size, _ in needed), max(size for size, _ in needed)
    gpu = {"base": "rtx-3090", "memory_bytes": round(((least + share * (most - least)) / 0.95 + 0.01) * GIB)}
    pretender = Pretender(some_prediction, model)
    found = run(given.replace("gpu", gpu), "throughput", options, pretender)
    fitting = [seconds for size, seconds in needed if size * GIB <= found.usable_bytes - NOTICEABLE_BYTES]
    assert found.best is not None
    assert not fitting or fastest(found) <= min(fitting) * 1.02
    assert len(pretender.asked) <= 50
