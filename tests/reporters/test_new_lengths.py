from dataclasses import replace

import pytest

from trainatomy.api import predict
from trainatomy.reporters import subject_sentences
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.workload.schema import Workload

EPOCH = {
    "gpu": "h200",
    "loop": "pytorch",
    "model": {"id": "gpt2", "config": {"n_layer": 1, "n_embd": 64, "n_head": 1, "vocab_size": 100}},
    "data": {"lengths": {"histogram": {32: 8, 64: 8}, "orders": 2}},
    "train": {"per_device_train_batch_size": 8, "bf16": True},
    "software": {"torch": "2.11"},
}


def test_lengths_that_are_new_to_cudnn_cost_a_plan_each() -> None:
    lengths = predict(Workload.from_mapping(EPOCH)).lengths
    assert lengths is not None
    assert lengths.new_shape_seconds == pytest.approx(0.028 + 0.060)
    assert lengths.new_shapes is not None
    assert 1 <= lengths.new_shapes <= 2
    found = subject_sentences.new_lengths(replace(lengths, new_shapes=2.0))
    assert found is not None
    assert found.startswith("A step takes about 88 ms longer")
    assert f"2 lengths in an epoch of {lengths.steps} steps, 176 ms" in found


def test_the_fullest_batch_of_the_worst_order_is_named() -> None:
    histogram = {**dict.fromkeys(range(40, 61), 1), 200: 3, 50: 3}
    data = {"lengths": {"histogram": histogram, "orders": 1}, "pad_to_multiple_of": 8}
    train = {"per_device_train_batch_size": 3, "train_sampling_strategy": "sequential"}
    prediction = predict(Workload.from_mapping({**EPOCH, "data": data, "train": train}))
    assert prediction.lengths is not None and prediction.lengths.fullest is not None
    found = prediction.lengths.fullest  # 23 samples come before those of 200 tokens
    assert (found.step, found.rows, found.row_tokens, found.samples) == (7, 3, 200, (200, 60, 59))
    said = "The fullest batch of that order has 3 rows of 200 tokens (samples of 200, 60, 59), in step 8."
    assert said in render(prediction_page(prediction), 300)
    many = subject_sentences.fullest_batch(replace(found, samples=tuple(range(200, 188, -1))))
    assert "(samples of 200, 199, 198, 197, 196, 195, 194, 193 and 4 shorter ones)" in many


def test_attention_of_pytorch_itself_needs_no_plan() -> None:
    lengths = predict(Workload.from_mapping({**EPOCH, "train": {"per_device_train_batch_size": 8}})).lengths
    assert lengths is not None
    assert lengths.new_shape_seconds == 0
    assert subject_sentences.new_lengths(lengths) is None


def test_forward_with_and_without_gradients_are_two_plans() -> None:
    """As with a reference model: cuDNN keeps a plan with the sums that backward needs, and one without them."""
    preferences = {
        **EPOCH,
        "loop": "dpo",
        "data": {**EPOCH["data"], "prompt_length": 8},
        "train": {"per_device_train_batch_size": 4},
    }
    lengths = predict(Workload.from_mapping(preferences)).lengths
    assert lengths is not None
    assert lengths.new_shape_seconds == pytest.approx(2 * 0.028 + 0.060)


def test_a_measured_epoch_is_compared_with_new_lengths_included() -> None:
    found = predict(Workload.from_mapping(EPOCH))
    lengths, time = found.lengths, found.time
    assert lengths is not None
    assert time is not None
    assert lengths.new_shapes is not None
    planning = (0.028 + 0.060) * lengths.new_shapes / lengths.steps
    assert time.first_epoch_step_seconds == pytest.approx(time.step_seconds + planning)
