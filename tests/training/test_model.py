"""The model of a workload: configuration, class, dtypes, adapters, frozen parameters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainatomy.catalog.architectures import architecture
from trainatomy.errors import FactoryError, MissingLibrary, NetworkError, WorkloadError
from trainatomy.training import hub
from trainatomy.training.model import build_model
from trainatomy.training.positions import lengths, position_limits, sequence_note
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from pathlib import Path


def on_meta(mapping: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return build_model(Workload.from_mapping(mapping))


def test_a_shipped_architecture_is_built_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_reachable", lambda endpoint: pytest.fail("asked the hub"))
    model = on_meta({"model": {"id": "meta-llama/Llama-3.1-405B", "dtype": "bfloat16"}})
    shipped = architecture("meta-llama/Llama-3.1-405B")
    assert shipped is not None
    assert sum(parameter.numel() for parameter in model.parameters()) == shipped.parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_configuration_decides_the_class_unless_one_is_named() -> None:
    bert = {"id": "google-bert/bert-base-uncased"}
    assert type(on_meta({"model": bert})).__name__ == "BertForMaskedLM"
    for name in ("BertForSequenceClassification", "AutoModelForSequenceClassification"):
        assert type(on_meta({"model": {**bert, "class": name}})).__name__ == "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [(["BertModel"], "BertForMaskedLM"), (None, "BertForMaskedLM"), (["GoneForGood"], "BertForMaskedLM")],
)
def test_a_configuration_without_a_head_gets_one(tmp_path: Path, architectures: Any, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": architectures}))
    assert type(on_meta({"model": {"id": str(tmp_path)}})).__name__ == expected


def test_overrides_go_by_either_name_and_cut_lists_by_layer(tmp_path: Path) -> None:
    gpt2 = {"id": "gpt2", "config": {"num_hidden_layers": 3, "hidden_size": 96, "n_head": 4}}
    model = on_meta({"model": gpt2})
    assert len(model.transformer.h) == 3
    assert model.config.n_embd == 96
    layers = {"model_type": "qwen2", "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps(layers))
    for depth in (2, 6):
        model = on_meta({"model": {"id": str(tmp_path), "config": {"num_hidden_layers": depth}}})
        assert len(model.config.layer_types) == len(model.model.layers) == depth


def test_attention_reaches_the_parts_of_a_joint_model(describe: Any) -> None:
    config = build_model(describe("CLIPModel", model={"attn_implementation": "eager"})).config
    parts = (config, config.text_config, config.vision_config)
    assert [part._attn_implementation for part in parts] == ["eager"] * 3


def test_attention_and_labels_reach_the_configuration() -> None:
    spec = {"id": "bert-base-uncased", "class": "BertForSequenceClassification", "attn_implementation": "eager"}
    model = on_meta({"model": {**spec, "config": {"num_labels": 7}}})
    assert model.config._attn_implementation == "eager"
    assert model.classifier.out_features == 7


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"id": "bert-base-uncased", "config": {"num_hiden_layers": 2}}, ["num_hiden_layers", "num_hidden_layers"]),
        ({"id": "bert-base-uncased", "class": "BertForSequenceClasification"}, ["BertForSequenceClassification"]),
        ({"id": "gpt2", "class": "BertForMaskedLM"}, ["model.class", "BertConfig", "GPT2Config"]),
        ({"class": "AutoModelForCausalLM"}, ["model.class", "model.id"]),
        ({"class": "BertTokenizer"}, ["model.class"]),
        ({"id": "./nowhere/at/all"}, ["no folder"]),
        ({"id": "bert-base-uncased", "freeze": "*.embedings.*"}, ["model.freeze"]),
        ({"id": "bert-base-uncased", "lora": {"target_modules": ["q_proj"]}}, ["model.lora", "q_proj"]),
    ],
)
def test_a_wrong_description_is_told_apart(model: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(WorkloadError) as error:
        on_meta({"model": model})
    assert all(word in str(error.value) for word in words), error.value


def test_an_unknown_name_without_network_names_what_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "_reachable", lambda endpoint: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(NetworkError, match="google-bert/bert-large-uncased"):
        on_meta({"model": {"id": "google-bert/bert-larg-uncased"}})


def test_code_from_the_hub_is_refused_unless_trusted(tmp_path: Path) -> None:
    raw = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(WorkloadError, match="--trust-remote-code"):
        on_meta({"model": {"id": str(tmp_path)}})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM", "GemmaForCausalLM"])
def test_dtypes_are_those_of_from_pretrained(describe: Any, tmp_path: Path, name: str, dtype: str) -> None:
    import transformers

    full = build_model(describe(name))
    full.save_pretrained(tmp_path)
    loaded = getattr(transformers, name).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    built = build_model(describe(name, model={"dtype": dtype}))
    for kind in ("named_parameters", "named_buffers"):
        expected = {key: tensor.dtype for key, tensor in getattr(loaded, kind)()}
        assert {key: tensor.dtype for key, tensor in getattr(built, kind)()} == expected


def test_adapters_are_trained_and_the_rest_is_frozen(describe: Any) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    model = build_model(describe("LlamaForCausalLM", model={"lora": lora, "dtype": "bfloat16"}))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name for name in trained)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}


def test_a_missing_peft_is_told_with_the_command(describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingLibrary, match="pip install peft"):
        build_model(describe("LlamaForCausalLM", model={"lora": {"r": 4}}))


def test_a_missing_flash_attention_is_told_with_what_to_use() -> None:
    with pytest.raises(MissingLibrary, match="sdpa"):
        on_meta({"model": {"id": "gpt2", "attn_implementation": "flash_attention_2"}})


def test_freeze_goes_by_pattern(describe: Any) -> None:
    model = build_model(describe(model={"freeze": ["*.embeddings.*", "*.layer.0.*"]}))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen
    assert all(".embeddings." in name or ".layer.0." in name for name in frozen)


@pytest.mark.parametrize(
    ("name", "sequence", "target"),
    [
        ("BertForSequenceClassification", 512, None),
        ("RobertaForSequenceClassification", 510, None),
        ("GPT2LMHeadModel", 1024, None),
        ("LlamaForCausalLM", None, None),
        ("T5ForConditionalGeneration", None, None),
        ("BartForConditionalGeneration", 1024, 1024),
        ("WhisperForConditionalGeneration", None, 448),
        ("CLIPModel", 77, None),
    ],
)
def test_position_tables_limit_the_text(describe: Any, name: str, sequence: int | None, target: int | None) -> None:
    with torch.device("meta"):
        model = build_model(describe(name))
    assert position_limits(model) == (sequence, target)


def test_lengths_follow_the_limits_and_beyond_them_are_refused(describe: Any) -> None:
    with torch.device("meta"):
        clip = build_model(describe("CLIPModel", data={}))
        llama = build_model(describe("LlamaForCausalLM", data={}))
        assert lengths(describe(data={}).data, clip).sequence == 77
        assert lengths(describe(data={}).data, llama).sequence == 512
        with pytest.raises(WorkloadError, match=r"data\.sequence_length: 1024 is longer than the 512"):
            build_model(describe(data={"sequence_length": 1024}))
        with pytest.raises(WorkloadError, match=r"data\.target_length: 449"):
            build_model(describe("WhisperForConditionalGeneration", data={"target_length": 449}))
    beyond = describe(data={"sequence_length": 4096}, name="LlamaForCausalLM").data
    assert "4096" in (sequence_note(beyond, llama) or "")
    assert sequence_note(describe(data={"sequence_length": 64}).data, llama) is None


def test_a_factory_must_return_a_module(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text("def build():\n    return 3\n")
    with pytest.raises(FactoryError, match=r"must return an nn\.Module, not a int"):
        on_meta({"model": {"factory": f"{file}:build"}})


@pytest.mark.parametrize("depth", [-2, "many", 1.5])
def test_a_number_of_layers_that_cannot_be_is_refused(depth: object) -> None:
    with pytest.raises(WorkloadError, match="must be a number of layers"):
        on_meta({"model": {"id": "gpt2", "config": {"n_layer": depth}}})
