"""The search executes few candidates, and none of those that it leaves out would have been better."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pretender import GIB, TINY, Model, Pretender

import trainatomy
from trainatomy.errors import SimulationError, TrainatomyError, WorkloadError
from trainatomy.requests.fitting import FitRequest
from trainatomy.results.fit import Fit
from trainatomy.results.prediction import Prediction
from trainatomy.search.axes import divisors
from trainatomy.search.explore import Exploration, Observer
from trainatomy.search.fitting import SAME_SPEED, search
from trainatomy.search.run import could_compile, run, with_compiled
from trainatomy.search.space import space_of
from trainatomy.workload.schema import Workload

MakePretender = Callable[..., Pretender]
KEPT = ("optimizer_implementation", "torch_empty_cache_steps")
"""Axes that are left out where a whole space is executed, to make it smaller."""


def searched(workload: Workload, pretender: Pretender, memory: float, **options: object) -> Fit:
    limited = workload.replace("gpu", {"base": "rtx-3090", "memory_bytes": round(memory * GIB)})
    return search(limited, FitRequest(**{"effective_batch_size": 64, **options}), pretender, Observer())[0]  # type: ignore[arg-type]


def fastest(fit: Fit) -> float:
    return min(each.step_seconds for each in fit.candidates)


@cache
def whole_space(size: int) -> tuple[Workload, ...]:
    """Return the workload of every candidate."""
    space = space_of(Workload.from_mapping(TINY), FitRequest(size, keep=KEPT))
    return tuple(map(space.workload_at, space.points({axis.name: space.options(axis) for axis in space.axes})))


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    memory=st.floats(3, 60),
    static=st.floats(0.5, 2.5),
    sample=st.floats(0.05, 2),
    saved=st.floats(0.2, 0.95),
    recompute=st.floats(0.1, 0.5),
    launch=st.floats(0, 0.2),
    noise=st.floats(0, 0.008),
    eager=st.floats(-0.1, 0.4),
    size=st.sampled_from([1, 24, 61, 64]),
)
def test_no_candidate_that_was_left_out_is_better(
    some_prediction: Prediction, memory: float, size: int, **changes: float
) -> None:
    model = Model(**changes)
    found = searched(
        Workload.from_mapping(TINY), Pretender(some_prediction, model), memory,
        effective_batch_size=size, prices=False, keep=KEPT,
    )  # fmt: skip
    steps = [model.step(workload) for workload in whole_space(size)]
    fitting = [seconds for *parts, seconds in steps if sum(round(part * GIB) for part in parts) <= found.usable_bytes]
    assert (found.best is None) == (not fitting)
    if fitting:
        assert fastest(found) <= min(fitting) * 1.01
    assert found.counts.executed <= len(steps) == found.counts.space


def test_few_candidates_are_executed_and_all_are_accounted_for(workload: Workload, pretender: MakePretender) -> None:
    executor = pretender()
    found = searched(workload, executor, 24, prices=False)
    counts = found.counts
    assert counts.executed == len(executor.asked) < counts.space / 20
    parts = (counts.executed, counts.too_large, counts.slower, counts.dominated, counts.failed, counts.unexplored)
    assert sum(parts) == counts.space


def test_options_are_tried_at_the_fastest_batch_size_only(workload: Workload, some_prediction: Prediction) -> None:
    class SlowBeyondEight(Model):
        def step(self, workload: Workload) -> tuple[float, float, float, float]:
            *memory, seconds = super().step(workload)
            return (*memory, seconds * (1.1 if workload.train.per_device_train_batch_size > 8 else 1))  # type: ignore[return-value]

    executor = Pretender(some_prediction, SlowBeyondEight())
    found = searched(workload, executor, 24)
    assert found.best is not None and found.best.per_device_train_batch_size == 8
    varied = [asked for asked in executor.asked if asked.train.gradient_checkpointing or asked.model.lora]
    assert varied and {asked.train.per_device_train_batch_size for asked in varied} == {8}


def test_a_process_that_would_wait_begins_what_is_wanted_later(workload: Workload, pretender: MakePretender) -> None:
    @dataclass
    class Unhurried(Pretender):
        """Executes at once what it is asked first, and the rest when ``finish`` is called."""

        later: list[tuple[Future[Prediction | TrainatomyError], Workload]] = field(default_factory=list)

        def submit(self, workload: Workload) -> Future[Prediction | TrainatomyError]:
            if not self.asked:
                return super().submit(workload)
            self.asked.append(workload)
            self.later.append((Future(), workload))
            return self.later[-1][0]

        def finish(self) -> None:
            for future, workload in self.later:
                future.set_result(self.prediction(workload))

    plain = pretender()
    executor = Unhurried(plain.like, plain.model)
    space = space_of(workload.replace("gpu", "a100-80gb"), FitRequest(effective_batch_size=64))
    exploration = Exploration(space, 70 * GIB, executor)
    first, second, third = (space.replaced(space.point(), "batch", batch) for batch in ("4", "2", "1"))
    exploration.execute([first], meanwhile=[first, second, third])
    assert list(exploration.outcomes) == [first]
    assert [asked.train.per_device_train_batch_size for asked in executor.asked] == [4, 2]
    executor.finish()
    exploration.execute([second])
    assert list(exploration.outcomes) == [first, second]


def test_the_effective_batch_size_never_changes(workload: Workload, pretender: MakePretender) -> None:
    executor = pretender()
    searched(workload, executor, 24)
    for asked in executor.asked:
        assert asked.train.per_device_train_batch_size * asked.train.gradient_accumulation_steps == 64


def test_only_what_is_allowed_changes_what_is_trained(workload: Workload, pretender: MakePretender) -> None:
    plain = searched(workload, pretender(), 24)
    assert not any(change.permission for each in plain.candidates for change in each.changes)
    assert any(price.change.permission and not price.allowed for price in plain.prices)
    allowed = searched(workload, pretender(), 24, allow=("sequence-length", "lora"))
    assert {c.permission for each in allowed.candidates for c in each.changes} >= {"sequence-length", "lora"}


def test_headroom_stays_free(workload: Workload, pretender: MakePretender) -> None:
    tight, roomy = (searched(workload, pretender(), 12, headroom=share) for share in (0.0, 0.3))
    assert all(each.device_bytes <= 0.7 * 12 * GIB for each in roomy.candidates)
    assert tight.best is not None and roomy.best is not None
    assert tight.best.per_device_train_batch_size > roomy.best.per_device_train_batch_size


def test_about_as_fast_means_the_one_with_fewer_changes(workload: Workload, pretender: MakePretender) -> None:
    found = searched(workload, pretender(eager=-SAME_SPEED / 2), 24)
    assert found.best is not None
    assert [change.axis for change in found.best.changes] == ["batch"]


@pytest.mark.parametrize(("eager", "is_chosen"), [(-0.05, False), (-0.5, True)])
def test_attention_stays_as_given_unless_another_is_certainly_faster(
    workload: Workload, pretender: MakePretender, eager: float, is_chosen: bool
) -> None:
    found = searched(workload, pretender(eager=eager, sample=0.1), 24)
    assert found.best is not None
    assert ("eager" in [change.option for change in found.best.changes]) == is_chosen


def test_expandable_segments_are_chosen_only_where_the_cache_is_in_the_way(
    workload: Workload, pretender: MakePretender
) -> None:
    # 16 samples hold 2 + 8 GiB, and 0.8 GiB of cache
    narrow = searched(workload, pretender(), 10.4, headroom=0.0)
    wide = searched(workload, pretender(), 12, headroom=0.0)
    assert narrow.best is not None and wide.best is not None
    assert [c.option for c in narrow.best.changes] == ["16", "expandable_segments"]
    assert [c.option for c in wide.best.changes] == ["16"]


def test_prices_are_single_changes_of_the_best_candidate(workload: Workload, pretender: MakePretender) -> None:
    found = searched(workload, pretender(), 24)
    assert found.best is not None
    by_option = {(price.change.axis, price.change.option): price for price in found.prices}
    recomputed = by_option["gradient_checkpointing", "on"]
    assert recomputed.device_bytes < 0 < recomputed.step_seconds
    assert not by_option["optimizer", "adamw_8bit"].allowed
    for price in found.prices:
        assert price.candidate is not None
        assert price.device_bytes == price.candidate.device_bytes - found.best.device_bytes


def test_ties_may_be_faster_and_recomputing_more_may_not(workload: Workload, pretender: MakePretender) -> None:
    found = searched(workload, pretender(launch=0.0, update=0.001, recompute=0.01), 24)
    assert found.best is not None and found.ties
    assert all(each.step_seconds <= 1.3 * found.best.step_seconds for each in found.ties)
    size = found.best.per_device_train_batch_size
    assert not any(
        each.per_device_train_batch_size == size and "gradient_checkpointing" in {c.axis for c in each.changes}
        for each in found.ties
    )


def test_an_option_that_cannot_be_predicted_is_left_out(workload: Workload, pretender: MakePretender) -> None:
    executor = replace(pretender(), fails=lambda one: one.model.attn_implementation == "eager")
    found = searched(workload, executor, 24)
    assert found.best is not None and found.counts.failed
    (price,) = (price for price in found.prices if price.change.axis == "attention")
    assert price.candidate is None and price.error == "cannot"


def test_a_change_of_what_a_model_does_not_have_has_no_price_unless_it_was_asked_for(
    workload: Workload, pretender: MakePretender
) -> None:
    executor = replace(
        pretender(),
        fails=lambda one: one.data.sequence_length != 256,
        error=WorkloadError("reads no text", key="data.sequence_length"),
    )
    for allow, errors in (((), []), (("sequence-length",), ["reads no text"])):
        prices = searched(workload, executor, 24, allow=allow).prices
        assert [price.error for price in prices if price.change.axis == "sequence_length"] == errors


def test_a_workload_that_cannot_be_predicted_is_an_error(workload: Workload, pretender: MakePretender) -> None:
    with pytest.raises(SimulationError):
        searched(workload, replace(pretender(), fails=lambda one: True), 24)


def test_an_interrupted_search_returns_the_best_so_far(workload: Workload, pretender: MakePretender) -> None:
    found = searched(workload, replace(pretender(), interrupt_after=4), 24)
    assert found.interrupted and found.best is not None and 0 < found.counts.executed <= 4
    nothing = searched(workload, replace(pretender(), interrupt_after=0), 24)
    assert nothing.interrupted and nothing.best is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effective_batch_size": 0}, "not a number of samples"),
        ({"headroom": 1.0}, "not a share"),
        ({"allow": ("precisn",)}, "did you mean precision"),
        ({"keep": ("attn",)}, "unknown value"),
        ({"effective_batch_size": 12, "keep": ("batch",)}, "no multiple of the batch size 8"),
    ],
)
def test_contradictions_are_named(workload: Workload, options: dict[str, object], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        space_of(workload, FitRequest(**options))  # type: ignore[arg-type]


def test_a_gpu_without_bf16_is_refused_unless_the_precision_may_change(workload: Workload) -> None:
    old = workload.replace({"gpu": "v100", "train.bf16": True})
    with pytest.raises(WorkloadError, match="no arithmetic units for bf16"):
        space_of(old, FitRequest())
    assert space_of(old, FitRequest(allow=("precision",))).size


def test_inference_has_no_settings_to_search(workload: Workload) -> None:
    with pytest.raises(WorkloadError, match="mode"):
        space_of(workload.replace("mode", "inference"), FitRequest())


def test_if_nothing_fits_the_remedies_are_ordered(workload: Workload, pretender: MakePretender) -> None:
    small = workload.replace("gpu", {"base": "rtx-3090", "memory_bytes": round(2.0 * GIB)})
    found = run(small, "throughput", FitRequest(8), pretender())
    assert found.best is None and found.shortage is not None
    remedies = found.shortage.remedies
    assert found.shortage.missing_bytes > 0 and remedies[0].candidate.fits
    kinds = [remedy.kind for remedy in remedies if remedy.candidate.fits]
    assert kinds == sorted(kinds, key=["same training", "changes training", "larger GPU"].index)
    assert kinds.count("larger GPU") == 2
    assert remedies[-1].candidate.prediction.gpu.memory_bytes > 2 * GIB
    assert found.counts.seconds > found.shortage.seconds > 0, "the search for remedies counts"
    changing = [each for each in remedies if each.kind == "changes training" and each.candidate.fits]
    assert changing and all(len(each.changes) == 1 for each in changing), "one is enough, so that none are combined"


@dataclass
class Compiling(Model):
    """A training that takes a share of the eager step when it is compiled, and half the memory for its batch."""

    compiled: float = 0.7
    by_layer: float = 0.8

    def step(self, workload: Workload) -> tuple[float, float, float, float]:
        static, memory, cache, seconds = super().step(workload)
        if not workload.train.torch_compile:
            return static, memory, cache, seconds
        is_by_layer = workload.train.dynamo_use_regional_compilation
        return static, memory / 2, cache, seconds * (self.by_layer if is_by_layer else self.compiled)


@pytest.mark.parametrize(("shares", "chosen"), [((0.7, 0.8), "whole"), ((0.9, 0.6), "by_layer"), ((0.99, 1.1), None)])
def test_compiling_is_tried_on_the_best_candidate_and_chosen_where_it_surely_pays(
    workload: Workload, some_prediction: Prediction, shares: tuple[float, float], chosen: str | None
) -> None:
    pretended = Pretender(some_prediction, Compiling(compiled=shares[0], by_layer=shares[1]))
    eager, request = searched(workload, pretended, 20), FitRequest(64)
    executed = len(pretended.asked)
    found = with_compiled(eager, request, pretended)
    assert eager.best is not None and found.best is not None
    assert len(pretended.asked) == executed + 2
    prices = {each.change.option: each for each in found.prices if each.change.axis == "torch_compile"}
    assert {name: each.step_seconds for name, each in prices.items()} == pytest.approx(
        {"whole": shares[0] - 1, "by_layer": shares[1] - 1}
    )
    assert all(each.device_bytes < 0 for each in prices.values())
    changed = {change.axis: change.option for change in found.best.changes}
    assert changed.get("torch_compile") == chosen
    assert found.candidates[0].workload == found.best.workload
    assert len(found.candidates) == len(eager.candidates) + 2
    assert ("compiled_is_best" in found.notes) == (chosen is not None)


@pytest.mark.parametrize(
    ("setting", "could"),
    [({}, True), ({"train.torch_compile": True}, False), ({"model.kernels": ["cut_cross_entropy"]}, False)],
)
def test_a_search_knows_whether_its_best_settings_could_be_compiled(
    workload: Workload, pretender: MakePretender, setting: dict[str, object], could: bool
) -> None:
    assert could_compile(searched(workload.replace(setting), pretender(), 20), FitRequest(64)) == could


def test_compiling_is_tried_on_what_does_not_compile_yet(workload: Workload, pretender: MakePretender) -> None:
    with pytest.raises(WorkloadError, match="every candidate is compiled"):
        searched(workload.replace("train.torch_compile", True), pretender(), 20, try_compile=True)
    with pytest.raises(WorkloadError, match="needs a workload, whose throughput"):
        trainatomy.fit(workload, maximize="batch", try_compile=True)


def test_a_compiled_candidate_that_cannot_be_predicted_is_named(workload: Workload, pretender: MakePretender) -> None:
    pretended = pretender()
    pretended.fails = lambda asked: asked.train.torch_compile
    eager = searched(workload, pretended, 20)
    found = with_compiled(eager, FitRequest(64), pretended)
    assert found.best is eager.best
    assert [each.error for each in found.prices[-2:]] == ["cannot", "cannot"]


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(60) == (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60)
    assert divisors(49) == (1, 7, 49)


def test_prices_are_of_the_best_candidate_even_if_a_price_finds_a_better_one(
    workload: Workload, pretender: MakePretender
) -> None:
    found = searched(workload, pretender(launch=0.0, noise=0.008, sample=0.1), 60)
    assert found.best is not None
    priced = {price.change.option for price in found.prices}
    assert {"on", "eager", "adamw_8bit", "sgd", "r16"} <= priced


def test_a_price_that_finds_a_better_candidate_ends_the_others(workload: Workload, pretender: MakePretender) -> None:
    """Check that no further prices of a candidate are executed once it is not the best one."""
    executor = pretender()
    executor.jobs = 1
    limited = workload.replace("gpu", "a100-80gb")
    space = space_of(limited, FitRequest(effective_batch_size=64))
    exploration = Exploration(space, 70 * GIB, executor)
    first, second, *others = space.points({"batch": {"1", "2"}, **{axis.name: {axis.given} for axis in space.axes[1:]}})
    exploration.execute([first], related=[second, *others], until=lambda: len(exploration.outcomes) > 0)
    assert list(exploration.outcomes) == [first]
    exploration.execute((), related=[second])
    assert list(exploration.outcomes) == [first, second]


def test_a_free_process_is_given_what_it_is_ready_for(workload: Workload, pretender: MakePretender) -> None:
    executor = pretender()
    executor.jobs = 1
    executor.pick = lambda kinships: len(kinships) - 1  # type: ignore[method-assign]
    limited = workload.replace("gpu", "a100-80gb")
    space = space_of(limited, FitRequest(effective_batch_size=64))
    exploration = Exploration(space, 70 * GIB, executor)
    points = [space.point(), *(space.replaced(space.point(), "batch", batch) for batch in ("1", "2", "4"))]
    exploration.execute(points[:1], related=points[1:])
    assert list(exploration.outcomes) == [points[0], *reversed(points[1:])]
