"""Predictions of trainings whose samples differ in length: epochs, orders, the mean step, searches."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

import trainatomy
from trainatomy.analysis.epochs import steps_to_replay, worst_of
from trainatomy.api.elsewhere import predict_candidate, predict_row
from trainatomy.errors import WorkloadError
from trainatomy.prediction.lengths import prediction_of_lengths
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.lengths import Distribution
from trainatomy.results.prediction import Prediction
from trainatomy.search.run import with_all_lengths
from trainatomy.simulator.lengths import simulate_lengths
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload

pytestmark = pytest.mark.usefixtures("kept_workspaces")

GPT2 = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 4096, "n_positions": 512}
HISTOGRAM = {20: 6, 100: 4, 300: 3, 500: 3}


def described(data: dict | None = None, **more: object) -> Workload:
    base = {
        "model": {"class": "GPT2LMHeadModel", "config": GPT2},
        "loop": "pytorch",
        "data": {"lengths": {"histogram": HISTOGRAM, "orders": 3}, **(data or {})},
        "train": {"per_device_train_batch_size": 2},
    }
    return Workload.from_mapping({**base, **more})


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return trainatomy.predict(described(), timeline=True)


def test_memory_is_that_of_the_worst_order(prediction: Prediction) -> None:
    lengths = prediction.lengths
    assert lengths is not None
    assert (lengths.steps, len(lengths.orders), lengths.samples.count) == (8, 3, 16)
    worst = next(order for order in lengths.orders if order.seed == lengths.worst_seed)
    assert worst == worst_of(lengths.orders)
    assert prediction.memory.peak_reserved_bytes == worst.peak_reserved_bytes
    assert prediction.memory.peak_reserved_bytes == max(order.peak_reserved_bytes for order in lengths.orders)
    assert prediction.memory.peak_allocated_bytes == max(worst.allocated_bytes) == worst.peak_allocated_bytes
    assert prediction.memory.components.total_bytes == prediction.memory.device_bytes
    assert prediction.timeline


def test_reserved_memory_grows_from_step_to_step(prediction: Prediction) -> None:
    assert prediction.lengths is not None
    for order in prediction.lengths.orders:
        assert list(order.reserved_bytes) == sorted(order.reserved_bytes)
        assert order.steps == tuple(range(8))
        assert all(held <= kept for held, kept in zip(order.allocated_bytes, order.reserved_bytes, strict=True))


def test_an_epoch_reserves_more_than_its_longest_batch_alone(prediction: Prediction) -> None:
    alone = trainatomy.predict(
        described().replace({"data.lengths": None, "data.sequence_length": 500, "data.padding": True})
    )
    assert prediction.memory.peak_reserved_bytes > alone.memory.peak_reserved_bytes
    assert prediction.memory.peak_allocated_bytes == pytest.approx(alone.memory.peak_allocated_bytes, rel=0.02)


def test_time_is_that_of_the_mean_step(prediction: Prediction) -> None:
    lengths, time = prediction.lengths, prediction.time
    assert lengths is not None and time is not None and lengths.step_seconds is not None
    epochs = simulate_lengths(described(), described().resolve_gpu())
    again = prediction_of_lengths(described(), epochs, PredictRequest(), started=0.0)
    assert again.time == time
    assert lengths.step_seconds.low <= time.step_seconds <= lengths.step_seconds.worst
    low, high = time.interval_seconds
    assert low < time.step_seconds < high
    assert lengths.tokens_per_step == pytest.approx(2 * fmean(k for k, n in HISTOGRAM.items() for _ in range(n)))
    assert lengths.padded_tokens_per_step > lengths.tokens_per_step
    assert (
        lengths.tokens_per_second
        == time.tokens_per_second
        == pytest.approx(lengths.tokens_per_step / time.step_seconds)
    )
    assert lengths.padding_share == pytest.approx(1 - lengths.tokens_per_step / lengths.padded_tokens_per_step)


def test_the_order_with_retries_is_shown_on_a_small_gpu(prediction: Prediction) -> None:
    memory = prediction.memory
    needed = memory.peak_reserved_bytes - 2**21 + memory.components.context
    small = trainatomy.predict(described(gpu={"base": "h200", "memory_bytes": needed}))
    assert small.lengths is not None
    assert small.memory.num_alloc_retries > 0 or not small.fits
    assert small.verdict != "fits"
    huge = trainatomy.predict(described(gpu={"base": "h200", "memory_bytes": memory.components.context + 2**26}))
    assert not huge.fits
    assert not any(order.fits for order in huge.lengths.orders) if huge.lengths else False


def test_packs_and_the_maximum_have_one_length() -> None:
    packed = trainatomy.predict(described({"packing": True, "sequence_length": 128}))
    padded = trainatomy.predict(described({"padding": "max_length", "sequence_length": 128}))
    assert packed.lengths is not None and padded.lengths is not None
    total = sum(min(length, 128) * count for length, count in HISTOGRAM.items())
    assert (packed.lengths.steps, packed.lengths.padding_share) == (total // 128 // 2, 0)
    assert (padded.lengths.steps, padded.lengths.orders) == (8, ())
    assert padded.lengths.padding_share == pytest.approx(1 - total / (16 * 128))
    assert padded.time is not None and packed.time is not None
    assert padded.time.tokens_per_second == padded.lengths.tokens_per_second
    assert "is padding" in render(prediction_page(padded), 120)


def test_packs_that_do_not_fill_a_step_are_refused() -> None:
    with pytest.raises(WorkloadError, match="0 packs do not fill one step of 2"):
        trainatomy.predict(described({"lengths": [20, 30], "packing": True, "sequence_length": 128}))


def test_the_page_and_the_json_show_the_orders(prediction: Prediction) -> None:
    page = render(prediction_page(prediction), 120)
    assert "16 samples of 20 to 500 tokens (mean 182), padded to the longest of a batch: 8 steps an epoch" in page
    assert "the mean step takes" in page
    assert "peak reserved" in page
    assert "3 orders, random; memory above is that of the worst" in page
    found = to_json(prediction)["lengths"]
    assert found["peak_reserved_bytes"]["worst"] == prediction.memory.peak_reserved_bytes
    assert len(found["orders"][0]["reserved_bytes"]) == 8


def test_the_chart_draws_the_orders(prediction: Prediction, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from trainatomy.cli.report import draw_lengths
    from trainatomy.reporters.charts.lengths import figure

    lines = figure(prediction).axes[0].get_lines()
    assert [len(line.get_xdata()) for line in lines] == [8, 8, 0, 8, 8]
    draw_lengths(tmp_path / "epoch.svg", prediction)
    assert (tmp_path / "epoch.svg").read_text().startswith("<?xml")
    draw_lengths(tmp_path / "none.svg", replace(prediction, lengths=None))
    assert not (tmp_path / "none.svg").exists()


def test_long_epochs_are_replayed_where_memory_grows() -> None:
    longest = [50, 60, 40, 70, 70, 30, 90, 20]
    assert steps_to_replay(longest, 10) == tuple(range(8))
    assert steps_to_replay(longest, 3) == (0, 1, 2, 3, 5, 6)


def test_a_distribution_counts_by_weight() -> None:
    assert Distribution.of([3.0, 1.0, 2.0]) == Distribution(2.0, 1.0, 3.0, 3.0)
    assert Distribution.of([1.0, 2.0], [9.0, 1.0]).median == 1.0


def test_what_is_measured_has_one_order() -> None:
    packed = {"model": {"id": "gpt2"}, "loop": "sft", "data": {"lengths": [5, 6]}, "trl": {"packing": True}}
    with pytest.raises(WorkloadError, match="steps: say how many steps to measure of an epoch of packs"):
        measurable(Workload.from_mapping(packed))
    assert measurable(Workload.from_mapping({**packed, "steps": 3})).steps == 3
    found = measurable(described())
    assert (found.steps, found.data.lengths.orders if found.data.lengths else 0) == (8, 1)
    assert measurable(found) == found
    plain = described().replace("data.lengths", None)
    assert measurable(plain) is plain


def test_candidates_of_a_search_have_fewer_orders_and_keep_their_description() -> None:
    workload = described({"lengths": {"histogram": dict.fromkeys(range(20, 60), 1), "orders": 5}})
    found = predict_candidate(partial(predict_row, PredictRequest(timed=False)), workload)
    assert found.lengths is not None
    assert (len(found.lengths.orders), found.workload) == (3, workload.to_mapping())
    assert found.lengths.executed_shapes <= 17 < found.lengths.shapes


def test_a_search_recommends_by_all_orders_and_the_mean_step() -> None:
    keep = ("optimizer_implementation", "attention", "allocator", "gradient_checkpointing", "torch_empty_cache_steps")
    workload = described({"lengths": {"histogram": HISTOGRAM, "orders": 4}})
    found = trainatomy.fit(workload, effective_batch_size=4, keep=keep, prices=False)
    assert found.best is not None and found.best is found.candidates[0]
    best = found.best.prediction
    assert best.lengths is not None
    assert len(best.lengths.orders) == 4
    assert best.memory.peak_reserved_bytes == max(order.peak_reserved_bytes for order in best.lengths.orders)
    assert len({each.prediction.lengths.steps for each in found.candidates if each.prediction.lengths}) == 1
    assert "best_with_all_lengths" in found.notes


def test_a_search_takes_the_next_candidate_where_the_best_does_not_fit_in_full() -> None:
    keep = ("optimizer_implementation", "attention", "allocator", "gradient_checkpointing", "torch_empty_cache_steps")
    found = trainatomy.fit(described(), effective_batch_size=4, keep=keep, prices=False)
    first, second, *_ = found.candidates

    def too_large(workload: Workload) -> Prediction:
        is_first = workload.to_mapping() == first.workload
        return replace(first.prediction, fits=False) if is_first else second.prediction

    checked = with_all_lengths(found, too_large)
    assert checked.best is not None
    assert checked.best.workload == second.workload
    assert [each.workload for each in checked.too_large] == [first.workload]
    nothing = with_all_lengths(found, lambda workload: replace(first.prediction, fits=False))
    assert (nothing.best, nothing.candidates, nothing.notes[-1]) == (None, (), "none_with_all_lengths: 5")


def test_a_live_module_and_a_batch_of_one_length() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2))
    data = {"lengths": {"histogram": HISTOGRAM, "orders": 1}}
    live = trainatomy.predict(model, data=data, per_device_train_batch_size=2)
    assert live.lengths is not None and live.lengths.steps == 8
    with pytest.raises(WorkloadError, match=r"data\.lengths: cannot be combined with a batch"):
        trainatomy.predict(model, batch={"input_ids": torch.ones(2, 8, dtype=torch.long)}, data=data)


def test_operations_of_one_step_need_one_length() -> None:
    with pytest.raises(WorkloadError, match=r"data\.lengths: ops lists one step"):
        trainatomy.ops(described())
