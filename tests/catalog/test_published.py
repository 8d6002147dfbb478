"""Published tables: complete, and consistent with themselves."""

import pytest

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.published import mixed_precision_by_batch, notebook, operator_shares

TABLE = notebook()


def test_the_notebook_has_nine_rows_of_one_effective_batch():
    assert len(TABLE.rows) == 9
    for row in TABLE.rows:
        assert row.train["per_device_train_batch_size"] * row.train.get("gradient_accumulation_steps", 1) == 4


@pytest.mark.parametrize("row", TABLE.rows, ids=lambda row: row.name)
def test_time_and_throughput_agree(row):
    assert row.samples_per_second == pytest.approx(TABLE.samples / row.seconds, rel=1e-3)


def test_memory_fits_the_gpu_and_its_context():
    v100 = find_gpu(TABLE.gpu)
    assert v100.context("eager-cuda-11").first_tensor_bytes == TABLE.context_bytes - 2 * 2**20
    weights = 4 * 335143938  # BERT-large with a classifier, fp32
    assert TABLE.model_bytes - TABLE.context_bytes == pytest.approx(weights, rel=0.01)
    for row in TABLE.rows:
        assert TABLE.model_bytes < row.memory_bytes < v100.memory_bytes


def test_fp16_saves_more_at_larger_batches():
    source, rows = mixed_precision_by_batch()
    savings = [row.fp32_mb - row.fp16_mb for row in rows]
    assert savings == [84, 178, 620, 1976] and "Hugging Face" in source


def test_operator_shares_are_whole():
    _, groups = operator_shares()
    assert sum(group.flop_percent for group in groups) == pytest.approx(100)
    assert sum(group.time_percent for group in groups) == pytest.approx(100)
