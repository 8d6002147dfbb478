"""Settings to change so that a dimension suits tensor cores."""

from __future__ import annotations

from typing import Any

import pytest
from operations_by_hand import array, call, product, step

from trainatomy.analysis.operation_table import OperationTable
from trainatomy.analysis.shapes import paddings, wasteful_shapes
from trainatomy.reporters.sentences import padding_advice
from trainatomy.results.operations import Call, Padding

LOOKUP = call("embedding", [array(50257, 768), array(8, 1024, dtype="int64", storage=1)], [array(8, 1024, 768)])


def found(*calls: Call, gpu_seconds: Any = None, **workload: Any) -> tuple[Padding, ...]:
    whole = OperationTable(step(*((one, "forward", "head") for one in calls)))
    return paddings(wasteful_shapes(whole, (9, 0), 132), whole, workload, gpu_seconds)


def aligned(one: Call) -> float:
    """Return a cost that is three times as high for sizes that are not multiples of 8."""
    sizes = {size for tensor in one.inputs for size in tensor.shape}
    return (one.flop or 0) * (3.0 if any(size % 8 for size in sizes) else 1.0)


def test_a_vocabulary_is_recognized_by_the_embedding_table() -> None:
    (one,) = found(LOOKUP, product(8192, 50257, 768), product(50257, 768, 8192))
    assert (one.setting, one.size, one.padded, one.products) == ("model.config.vocab_size", 50257, 50304, 2)
    assert "resize_token_embeddings(pad_to_multiple_of=64)" in padding_advice(one) and one.gain_seconds is None


def test_no_setting_is_suggested_for_a_factory() -> None:
    (one,) = found(LOOKUP, product(8192, 50257, 768), model={"factory": "mine:model"})
    assert one.setting == "" and "resize_token_embeddings" in padding_advice(one)


def test_rows_are_the_batch_times_the_length() -> None:
    (one,) = found(product(6 * 333, 3072, 768), data={"sequence_length": 333}, train={"per_device_train_batch_size": 6})
    assert (one.setting, one.value, one.padded_value) == ("data.sequence_length", 333, 384)
    assert (one.size, one.padded) == (6 * 333, 6 * 384)
    assert padding_advice(one).startswith("rows are 6 x 333: pad the 333; tokenizer(")


def test_inference_uses_the_eval_batch_size() -> None:
    settings = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 999}
    (one,) = found(product(999, 768, 3072), train=settings, mode="inference")
    assert (one.setting, one.padded_value) == ("train.per_device_eval_batch_size", 1024)


def test_widths_come_from_the_architecture() -> None:
    (one,) = found(product(4096, 1234, 768), model={"id": "gpt2", "config": {"n_inner": 1234}})
    assert (one.setting, one.padded_value) == ("model.config.n_inner", 1280) and "from scratch" in padding_advice(one)


def test_a_size_that_no_setting_decides() -> None:
    (one,) = found(product(4096, 1234, 768))
    assert (one.setting, one.modules) == ("", ("head",)) and "no setting" in padding_advice(one)


def test_the_larger_multiple_is_preferred_if_it_gains_as_much() -> None:
    """50304 computes 0.1 % more than 50264; 384 in place of 336 computes 14 % more."""
    assert found(LOOKUP, product(8192, 50257, 768), gpu_seconds=aligned)[0].padded == 50304
    short = found(product(8192, 333, 768), data={"sequence_length": 333}, gpu_seconds=aligned)
    assert short[0].padded_value == 336
    assert short[0].gain_seconds == pytest.approx(2 * 8192 * 768 * (3 * 333 - 336))


def test_paddings_that_gain_nothing_are_left_out() -> None:
    assert found(LOOKUP, product(8192, 50257, 768), gpu_seconds=lambda one: float(one.flop or 0)) == ()
