"""Workload files with typical mistakes: one message with the line and the remedy."""

# ruff: noqa: E501 - tables read better in long lines

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload, read, read_all

if TYPE_CHECKING:
    from pathlib import Path

ISSUE = """\
model:
  id: google-bert/bert-large-uncased   # hub id or local folder
  class: BertForSequenceClassification
  config: {num_hidden_layers: 24}
  attn_implementation: sdpa
  dtype: bfloat16
  lora: {r: 16, target_modules: [q_proj, v_proj], lora_dropout: 0.0}
data:
  sequence_length: 512
loop: trainer
zero_grad_set_to_none: true
train:
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 1
  gradient_checkpointing: false
  fp16: false
  bf16: no
  tf32: false
  optim: adamw_torch_fused
  optim_args: "foreach=True"
  max_grad_norm: 1.0
  learning_rate: 5e-5
gpu: h200
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "workload.yaml"


def refusal(file: Path, text: str | bytes) -> str:
    """Return the error message for a file with this content, without the folder."""
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WorkloadError) as error:
        read(file)
    return str(error.value).replace(str(file), file.name)


def test_a_file_with_every_section(file: Path) -> None:
    file.write_text(ISSUE)
    workload = read(file)
    assert workload.model.class_ == "BertForSequenceClassification"
    assert workload.model.lora is not None and workload.model.lora.target_modules == ("q_proj", "v_proj")
    assert (workload.data.sequence_length, workload.train.learning_rate, workload.train.tf32) == (512, 5e-5, False)
    assert workload.where("train", "fp16") == f"{file}:16: train.fp16"
    assert workload.where("steps") == "steps"


def test_json_is_yaml(file: Path) -> None:
    file.write_text('{"model": {"id": "gpt2"}, "train": {"fp16": true}}')
    assert read(file).train.fp16


def test_written_yaml_is_read_again(file: Path) -> None:
    file.write_text(ISSUE)
    workload = read(file)
    file.write_text(workload.to_yaml())
    assert read(file) == workload


def test_empty_sections_a_byte_order_mark_and_anchors_are_fine(file: Path) -> None:
    file.write_text("\ufeffmodel: &m {id: gpt2}\ntrain:\ndata:\nsoftware:\n", encoding="utf-8")
    assert read(file) == Workload.from_mapping({"model": {"id": "gpt2"}})


def test_merge_keys_are_followed(file: Path) -> None:
    file.write_text("model: {<<: {id: gpt2}, dtype: bf16}\n")
    assert read(file).model.id == "gpt2"


def test_factory_paths_are_relative_to_the_file(file: Path) -> None:
    file.write_text("model: {factory: 'nets/build.py:net'}\ndata: {factory: package.module:batch}\n")
    workload = read(file)
    assert workload.model.factory == f"{file.parent.resolve()}/nets/build.py:net"
    assert workload.data.factory == "package.module:batch"


def test_model_folders_are_relative_to_the_file_and_hub_ids_are_not(file: Path) -> None:
    file.write_text("model: {id: ./checkpoint}\n")
    assert read(file).model.id == str(file.parent.resolve() / "checkpoint")
    file.write_text("model: {id: openai-community/gpt2}\n")
    assert read(file).model.id == "openai-community/gpt2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "workload.yaml: the file is empty; a workload names at least a model"),
        ("# only a comment\n", "workload.yaml: the file is empty; a workload names at least a model"),
        ("just text\n", "workload.yaml:1: a workload is a mapping of keys (model, data, train, …) to values"),
        ("- model\n", "workload.yaml:1: a workload is a mapping of keys (model, data, train, …) to values"),
        ("train:\n  fp16: true\n", "workload.yaml:1: model: is missing: a workload names a model, such as `model: {id: gpt2}`"),
        ("model:\n\tid: gpt2\n", "workload.yaml:2:1: malformed YAML: a tab; YAML is indented with spaces\n     id: gpt2\n    ^"),
        ("model: {id: gpt2\n", "workload.yaml:1:8: malformed YAML: while parsing a flow mapping, which begins here and does not end\n    model: {id: gpt2\n           ^"),
        ("model:\n  id: 'gpt2\n", "workload.yaml:2:7: malformed YAML: while scanning a quoted scalar, which begins here and does not end\n      id: 'gpt2\n          ^"),
        ("a: b: c\n", "workload.yaml:1:5: malformed YAML: mapping values are not allowed here\n    a: b: c\n        ^"),
        ("model: {id: gpt2}\n---\nmodel: {id: gpt2}\n", "workload.yaml:2:1: malformed YAML: a second document begins; a workload file holds one\n    ---\n    ^"),
        ("model: {id: gpt2}\ntrain:\n  fp16: true\n  fp16: false\n", "workload.yaml:4: train.fp16: is given twice (first in line 3)"),
        ("model: {id: gpt2}\n1: 2\n", "workload.yaml:2: a key must be a word, found '1'"),
        ("model: {id: gpt2}\ntrain:\n  fp61: true\n", "workload.yaml:3: train.fp61: unknown key; did you mean fp16?"),
        ("model: {id: gpt2}\ntrain:\n  fp16: true\n\n  bf16: true\n", "workload.yaml:3: train.fp16: cannot be combined with bf16: choose one precision"),
        ("model: {id: gpt2}\ntrain: {per_device_train_batch_size: 0}\n", "workload.yaml:2: train.per_device_train_batch_size: must be at least 1, found 0"),
        ("model:\n  id:\n", "workload.yaml:1: model: names no model: give `id`, or `class` with `config`, or `factory`"),
        ("model: {id: gpt2}\ngpu: 4095\n", "workload.yaml:2: gpu: unknown GPU '4095'; did you mean 4090"),
        ("model: {id: gpt2}\nsoftware: {torch: 2.10}\n", 'workload.yaml:2: software.torch: is read as a number: put it in quotes, as in torch: "2.10"'),
        ("model: !!python/object:os.system {}\n", "workload.yaml:1:8: malformed YAML: could not determine a constructor"),
        ("model: {id: gpt2}\nname: 2024-13-45\n", "workload.yaml: holds a value that YAML cannot read: month must be in 1..12"),
        ("model: &m\n  config: *m\n", "workload.yaml:1: is nested too deeply to be a workload"),
        ("[" * 5000, "workload.yaml: is nested too deeply to be a workload"),
        (b"\x80\x04\x95\xff", "workload.yaml: is not a text file; a workload is a YAML file"),
        (b"PK\x03\x04", "workload.yaml: is not valid YAML text: unacceptable character"),
    ],
)  # fmt: skip
def test_mistakes_have_a_line_number(file: Path, text: str | bytes, message: str) -> None:
    assert refusal(file, text).startswith(message)


def test_aliases_cannot_grow_without_bound(file: Path) -> None:
    layers = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert "nested too deeply" in refusal(file, f"a0: &a0 [x]\n{layers}")


def test_all_problems_are_listed_with_their_lines(file: Path) -> None:
    text = "model: {id: gpt2}\ntrain:\n  optim: adam\n  fp16: true\n  bf16: true\n  wramup: 3\nsteps: -1\n"
    lines = refusal(file, text).splitlines()
    assert [line.split(": ")[:2] for line in sorted(lines)] == [
        ["workload.yaml:3", "train.optim"],
        ["workload.yaml:4", "train.fp16"],
        ["workload.yaml:6", "train.wramup"],
        ["workload.yaml:7", "steps"],
    ]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"nothing\.yaml: no such file"):
        read(tmp_path / "nothing.yaml")
    with pytest.raises(WorkloadError, match="is a folder; a workload is a YAML file"):
        read(str(tmp_path))


ROWS = """\
model: {id: gpt2}
train:
  fp16: true
rows:
  - name: plain
  - train: {fp16: false,
            bf16: true}
"""


def test_rows_override_the_common_settings(file: Path) -> None:
    file.write_text(ROWS)
    first, second = read_all(file)
    assert (first.name, first.train.fp16) == ("plain", True)
    assert (second.name, second.train.fp16, second.train.bf16) == (None, False, True)
    assert first.where("train", "fp16") == f"{file}:3: train.fp16"
    assert second.where("train", "bf16") == f"{file}:7: train.bf16"


def test_all_rows_with_mistakes_are_listed(file: Path) -> None:
    message = refusal(file, ROWS + "  - {steps: 0}\n  - {trian: {}}\n")
    assert message.splitlines() == [
        "workload.yaml:8: rows.2.steps: must be at least 1, found 0",
        "workload.yaml:9: rows.3.trian: unknown key; did you mean train?",
    ]


def test_a_mistake_common_to_all_rows_is_reported_once(file: Path) -> None:
    assert refusal(file, "model: {id: gpt2}\nsteps: 0\nrows: [{name: a}, {name: b}]\n") == (
        "workload.yaml:2: steps: must be at least 1, found 0"
    )


def test_several_workloads_are_refused_where_one_is_expected(file: Path) -> None:
    assert "describes 2 workloads" in refusal(file, ROWS)
    assert "rows: must be a list of workloads" in refusal(file, "model: {id: gpt2}\nrows: 3\n")
