"""The form: its workload, its link, and what a server refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from trainatomy.app.answers import Answers, Request, Task
from trainatomy.app.form import MAX_CONFIG_CHARACTERS, Form, Lengths, in_terms_of_the_page, lengths_of
from trainatomy.errors import TrainatomyError, WorkloadError

CHANGED = Form(
    "Qwen/Qwen2.5-0.5B", "", "a100-80gb", 2, 256, 4, "fp16", "adafactor", True, 16, "4-bit"
)  # every field but config differs from the default


def test_the_workload_says_what_the_form_says() -> None:
    workload = CHANGED.workload()
    assert workload.model.id == "Qwen/Qwen2.5-0.5B"
    assert workload.model.lora is not None and workload.model.lora.r == 16
    assert workload.model.quantization is not None and workload.model.quantization.load_in_4bit
    assert workload.data.sequence_length == 256
    train = workload.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (2, 4)
    assert train.fp16 and not train.bf16 and train.gradient_checkpointing and train.optim == "adafactor"


@pytest.mark.parametrize("form", [Form(), CHANGED, Form(config='{"a": "ä&="}')])
def test_a_link_holds_the_whole_form(form: Form) -> None:
    assert Form.of_query(dict(parse_qsl(form.query()))) == form


def test_the_default_form_needs_no_query() -> None:
    assert Form().query() == ""


def test_a_link_with_a_word_for_a_number_is_refused() -> None:
    with pytest.raises(WorkloadError, match="batch='many' is not a whole number"):
        Form.of_query({"batch": "many", "utm_source": "mail"})


def test_a_pasted_configuration_is_the_model() -> None:
    text = json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2})
    model = Form(config=text).workload().model
    assert (model.class_, model.id, model.config["n_layer"]) == ("GPT2LMHeadModel", None, 2)


@pytest.mark.parametrize("name", ["/etc", "../model", "./model", "a/b/c", "file.py:build", "https://x.y/z", ""])
def test_paths_and_factories_are_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="reads no folders"):
        Form(model=name).workload()


def test_a_folder_of_the_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match="reads no folders"):
        Form(model="private").workload()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "not an object"),
        ('{"n_layer": 2}', "names no class"),
        ('{"architectures": ["os.system"]}', "names no class"),
        ('{"architectures": ["A"], "auto_map": {"AutoModel": "x.Y"}}', "code on the hub"),
        ('{"architectures": ["A"], "quantization_config": {"bits": 4}}', "quantisation in the form"),
        (" " * MAX_CONFIG_CHARACTERS + "{}", "at most"),
    ],
)
def test_configurations_are_refused_by_name(config: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        Form(config=config).workload()


@pytest.mark.parametrize(
    "change",
    [{"batch": 0}, {"batch": 10**6}, {"length": 10**7}, {"lora_rank": -1}, {"optimizer": "my.module.Optimizer"}],
)
def test_values_beyond_the_limits_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(WorkloadError, match=next(iter(change))):
        replace(Form(), **change).workload()


def test_precision_and_length_suit_the_gpu_and_the_model() -> None:
    assert Form(gpu="t4").suited().precision == "fp16"
    assert Form(gpu="k80").suited().precision == "fp32"
    assert Form(model="google/vit-base-patch16-224").suited().length == 0
    assert lengths_of("FacebookAI/roberta-base", "").most == 512
    assert lengths_of("gpt2", "").most == 1024
    assert lengths_of("", '{"max_position_embeddings": 128}') == Lengths(128, 128)


@pytest.mark.parametrize("form", [Form(gpu="t4"), Form(model="google/vit-base-patch16-224")])
def test_a_link_without_precision_and_length_gets_those_that_suit(form: Form) -> None:
    suited = form.suited()
    assert Form.of_query(dict(parse_qsl(suited.query()))) == suited
    assert "precision" not in suited.query() and "length" not in suited.query()


def test_settings_of_a_search_become_those_of_the_form_if_it_has_them_all() -> None:
    workload = replace(CHANGED, batch=4, accumulation=2, checkpointing=False).workload().to_mapping()
    assert CHANGED.with_settings(workload) == replace(CHANGED, batch=4, accumulation=2, checkpointing=False)
    assert CHANGED.with_settings({**workload, "allocator": "expandable_segments:True"}) is None


@pytest.mark.parametrize(
    ("form", "task", "said"),
    [
        (Form(gpu="t4"), "fit", r"^Precision: .*tick precision above the button"),
        (Form(model="google/vit-base-patch16-224"), "bill", "^Sequence length: .*reads no text: set it to 0"),
        (Form(length=4096), "bill", "^Sequence length: 4096 is longer"),
    ],
)
def test_refusals_name_the_fields_of_the_page(form: Form, task: Task, said: str) -> None:
    with pytest.raises(TrainatomyError, match=said) as caught:
        Answers().answer(Request.of(task, form.workload()))
    assert "--" not in str(caught.value)


def test_a_refusal_of_the_form_names_its_field() -> None:
    with pytest.raises(WorkloadError) as caught:
        Form(quantization="4-bit").workload()
    assert in_terms_of_the_page(caught.value).startswith(
        "Quantised weights: quantised weights cannot be trained: set a"
    )
    assert in_terms_of_the_page(WorkloadError("do: --this")) == "do: --this (on the command line)"
