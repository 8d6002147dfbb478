"""The notebook's nine trainings match the cells of the notebook."""

from __future__ import annotations

import pytest

from trainatomy.workload import Workload, notebook

ADAMW_OF_2022 = "trainatomy.training.adamw_hf.AdamW"
ACCUMULATED = (1, 4)
ROWS = [
    # batch and accumulation, checkpointing, fp16, optimizer (None: AdamW)
    ((4, 1), False, False, None),
    (ACCUMULATED, False, False, None),
    (ACCUMULATED, True, False, None),
    ((4, 1), False, True, None),
    (ACCUMULATED, True, True, None),
    ((4, 1), False, False, "adafactor"),
    (ACCUMULATED, True, True, "adafactor"),
    ((4, 1), False, False, "bitsandbytes.optim.Adam8bit"),
    (ACCUMULATED, True, True, "bitsandbytes.optim.Adam8bit"),
]


@pytest.mark.parametrize(("era", "adamw"), [("today", "adamw_torch_fused"), ("2022", ADAMW_OF_2022)])
def test_nine_rows(era: str, adamw: str) -> None:
    found = [
        (
            (row.train.per_device_train_batch_size, row.train.gradient_accumulation_steps),
            row.train.gradient_checkpointing,
            row.train.fp16,
            None if row.train.optim == adamw else row.train.optim,
        )
        for row in notebook(era)  # type: ignore[arg-type]
    ]
    assert found == ROWS


@pytest.mark.parametrize("era", ["today", "2022"])
def test_all_rows_are_bert_large_with_512_tokens(era: str) -> None:
    rows = notebook(era)  # type: ignore[arg-type]
    assert {(row.model.id, row.model.class_, row.data.sequence_length, row.data.has_mask) for row in rows} == {
        ("google-bert/bert-large-uncased", "BertForSequenceClassification", 512, False)
    }
    assert len({row.name for row in rows}) == 9


def test_rows_of_2022_use_the_software_of_2022() -> None:
    for row in notebook("2022"):
        assert (row.era, row.gpu, row.model.attn_implementation, row.zero_grad_set_to_none) == (
            "2022",
            "v100-16gb",
            "eager",
            False,
        )
        assert row.software.torch == "1.10"
        assert row.train.gradient_checkpointing_kwargs == {"use_reentrant": True}


def test_rows_of_today_are_plain_workloads() -> None:
    assert notebook()[0] == Workload.from_mapping(
        {
            "name": "vanilla",
            "model": {"id": "google-bert/bert-large-uncased", "class": "BertForSequenceClassification"},
            "data": {"sequence_length": 512},
            "train": {"per_device_train_batch_size": 4},
        }
    )
    assert {row.gpu for row in notebook(gpu="b200")} == {"b200"}
