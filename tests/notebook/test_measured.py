"""The notebook's nine trainings as measured on an H200; with current software all figures match to the byte.

``tests/data/h200-notebook.jsonl``: one row a training of google-bert/bert-large-uncased, four steps each in a process
of its own (torch 2.11 on CUDA 13, transformers 5.17).  ``nvml_*`` is the memory of the whole card, in bytes: before the
process touched it, and after its last step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainatomy.api import predict
from trainatomy.workload import Workload

FILE = Path(__file__).parents[1] / "data" / "h200-notebook.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
OPTIMIZERS = {"adamw_fused": "adamw_torch_fused", "adafactor": "adafactor", "adam8bit": "bitsandbytes.optim.Adam8bit"}
PROMPT = {"seed_vanilla", "seed_fp16", "seed_adafactor", "seed_adam8"}
"""Rows without accumulation: one forward and backward a step."""


def workload(row: dict[str, Any]) -> Workload:
    train = {
        "per_device_train_batch_size": row["bs"],
        "gradient_accumulation_steps": row["ga"],
        "gradient_checkpointing": row["ckpt"],
        "fp16": row["amp"] == "fp16",
        "optim": OPTIMIZERS[row["optim"]],
    }
    return Workload.from_mapping({
        "model": {"id": "google-bert/bert-large-uncased", "class": "BertForSequenceClassification"},
        "data": {"sequence_length": row["seq"]},
        "train": train,
        "gpu": "h200",
        "software": {"torch": "2.11"},
    })  # fmt: skip


def cases() -> list[Any]:
    return [pytest.param(row, id=row["name"], marks=() if row["name"] in PROMPT else pytest.mark.slow) for row in ROWS]


def test_all_nine_rows_are_there() -> None:
    assert len({row["name"] for row in ROWS}) == 9
    assert {row["name"] for row in ROWS} >= PROMPT


@pytest.mark.parametrize("row", cases())
def test_to_the_byte(row: dict[str, Any]) -> None:
    if row["optim"] == "adam8bit":
        pytest.importorskip("bitsandbytes")
    memory = predict(workload(row)).memory
    predicted = {
        "model": memory.model_bytes,
        "allocated": memory.peak_allocated_bytes,
        "reserved": memory.peak_reserved_bytes,
        "device": memory.device_bytes,
    }
    measured = {
        "model": row["alloc_model"],
        "allocated": row["peak_alloc_all"],
        "reserved": row["peak_reserved_all"],
        "device": row["nvml_end"] - row["nvml_start"],
    }
    assert predicted == measured
