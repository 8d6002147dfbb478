"""The model of a workload: configuration, class, dtypes, adapters, frozen parameters."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from trainatomy.catalog.architectures import ArchitectureEntry, architecture, architectures
from trainatomy.catalog.versions import transformers_since, version_text
from trainatomy.errors import FactoryError, MissingLibrary, NetworkError, SimulationError, WorkloadError
from trainatomy.training import process, stored_weights
from trainatomy.training import stored_weights as hub
from trainatomy.training.configuration import DTYPES, build_configuration
from trainatomy.training.model import build_model, model_notes
from trainatomy.training.positions import lengths, position_limits, sequence_note
from trainatomy.workload.model import ModelSpec
from trainatomy.workload.schema import Workload

SMALL: dict[str, Any] = {"class": "GPT2LMHeadModel", "config": {"n_embd": 32, "n_layer": 1, "n_head": 2}}


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


def test_overrides_accept_either_name_and_shorten_lists_by_layer(tmp_path: Path) -> None:
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


def test_a_key_that_only_the_model_reads_is_accepted(describe: Any) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = {**small, "head_dim": 24, "num_experts": 2, "experts_implementation": "eager"}  # neither is declared
    model = build_model(describe("Qwen3MoeForCausalLM", model={"config": config}))
    assert model.model.layers[0].self_attn.q_proj.out_features == 48
    assert model.config._experts_implementation == "eager"


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
        (
            {"class": "MixtralForCausalLM", "config": {"experts_implementation": "sonicmoe"}},
            ["experts_implementation", "grouped_mm"],
        ),
        ({"id": "gpt2", "class": "BertForMaskedLM"}, ["model.class", "BertConfig", "GPT2Config"]),
        ({"class": "AutoModelForCausalLM"}, ["model.class", "model.id"]),
        ({"class": "BertTokenizer"}, ["model.class"]),
        ({"id": "./nowhere/at/all"}, ["no folder"]),
        ({"id": "bert-base-uncased", "freeze": "*.embedings.*"}, ["model.freeze"]),
        ({"id": "bert-base-uncased", "lora": {"target_modules": ["q_proj"]}}, ["model.lora", "q_proj"]),
    ],
)
def test_errors_of_a_description_are_distinguished(model: dict[str, Any], words: list[str]) -> None:
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


def test_adapters_of_an_architecture_that_peft_does_not_know_are_answered(describe: Any) -> None:
    with pytest.raises(WorkloadError, match=r"peft refuses: .*\(all linear layers: `target_modules: all-linear`\)"):
        build_model(describe("MixtralForCausalLM", model={"lora": {"r": 4}}))


def test_missing_peft_is_reported_with_the_install_command(describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingLibrary, match="pip install peft"):
        build_model(describe("LlamaForCausalLM", model={"lora": {"r": 4}}))


def test_missing_flash_attention_is_reported_with_an_alternative() -> None:
    with pytest.raises(MissingLibrary, match="sdpa"):
        build_model(Workload.from_mapping({"model": {**SMALL, "attn_implementation": "flash_attention_2"}}))


@pytest.mark.parametrize("attention", ["flash_attention_3", "kernels-community/flash-attn"])
def test_attention_kernels_that_are_not_simulated_are_refused_with_what_to_use(attention: str) -> None:
    with pytest.raises(SimulationError, match=f"model.attn_implementation: {attention}.*not simulated.*sdpa"):
        on_meta({"model": {"id": "gpt2", "attn_implementation": attention}})


def stored(folder: Path, **settings: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **SMALL["config"], **settings}))
    return str(folder)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_weights_have_the_dtype_of_the_checkpoint_with_a_note(tmp_path: Path, key: str) -> None:
    model = on_meta({"model": {"id": stored(tmp_path, **{key: "bfloat16"})}})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    (note,) = model_notes(model)
    assert note.startswith("weights in bfloat16, as the checkpoint stores them")


def test_a_specified_dtype_is_used_without_a_note(tmp_path: Path) -> None:
    model = on_meta({"model": {"id": stored(tmp_path, dtype="bfloat16"), "dtype": "float32"}})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model_notes(model) == ()


def test_a_checkpoint_without_dtype_is_assumed_float32_with_a_note(tmp_path: Path) -> None:
    model = on_meta({"model": {"id": stored(tmp_path)}})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    (note,) = model_notes(model)
    assert "does not name the dtype" in note
    assert model_notes(on_meta({"model": {"id": stored(tmp_path, dtype="float32")}})) == ()


def test_a_checkpoint_that_is_stored_quantised_has_plain_weights_in_bfloat16(tmp_path: Path) -> None:
    dequantised = {"quant_method": "fp8", "dequantize": True}
    model = on_meta({"model": {"id": stored(tmp_path, quantization_config=dequantised)}})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert "weights in bfloat16: the configuration" in model_notes(model)[0]
    named = on_meta({"model": {"id": stored(tmp_path, quantization_config=dequantised, dtype="float16")}})
    assert {parameter.dtype for parameter in named.parameters()} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_files_of_a_checkpoint_say_what_its_configuration_does_not(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    tensors = {"number": torch.ones(2, dtype=torch.int32), "weight": torch.ones(2, dtype=dtype)}
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    model = on_meta({"model": {"id": stored(tmp_path)}})
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize("entry", architectures(), ids=lambda entry: entry.hub_id)
def test_the_dtype_of_every_shipped_checkpoint_is_known(entry: ArchitectureEntry) -> None:
    config = build_configuration(ModelSpec(id=entry.hub_id))
    assert config.dtype in DTYPES.values()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_override_of_the_configurations_dtype_applies(tmp_path: Path, key: str) -> None:
    for model in (SMALL, {"id": stored(tmp_path, torch_dtype="float16")}):
        config = {**model.get("config", {}), key: "torch.bfloat16"}
        built = on_meta({"model": {**model, "config": config}})
        assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}


def test_conflicting_or_unknown_dtypes_are_refused() -> None:
    config = {**SMALL["config"], "dtype": "bfloat16"}
    with pytest.raises(WorkloadError, match=r"model\.config\.dtype: cannot be combined with dtype: float32"):
        Workload.from_mapping({"model": {**SMALL, "dtype": "float32", "config": config}})
    with pytest.raises(WorkloadError, match=r"model\.config\.dtype: must be one of float32"):
        on_meta({"model": {**SMALL, "config": {**config, "dtype": "int8"}}})


def test_the_software_of_2022_loads_every_checkpoint_in_float32(tmp_path: Path) -> None:
    model = on_meta({"model": {"id": stored(tmp_path, dtype="bfloat16")}, "era": "2022", "gpu": "v100-16gb"})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_float16_weights_of_a_checkpoint_cannot_be_trained_with_gradient_scaling(tmp_path: Path) -> None:
    mapping: dict[str, Any] = {"model": {"id": stored(tmp_path, dtype="float16")}, "train": {"fp16": True}}
    with pytest.raises(WorkloadError, match=r"train\.fp16: .* stores its weights in float16"):
        on_meta(mapping)
    on_meta({**mapping, "mode": "inference"})
    on_meta({**mapping, "train": {"bf16": True}})
    for stage in (1, 2, 3):  # DeepSpeed scales its loss itself
        zero = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}}
        deepspeed = {**mapping, "train": {"fp16": True, "deepspeed": {**zero, "fp16": {"enabled": "auto"}}}}
        on_meta(deepspeed)
        on_meta({**deepspeed, "model": {**SMALL, "dtype": "float16"}})


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq, by gptqmodel"),
        ({"quant_method": "mxfp4"}, "mxfp4, by the hub's kernels"),
        ({"quant_method": "fp8"}, "fp8, by the hub's kernels"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes without load_in_4bit or load_in_8bit"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "version_of", lambda library: "3.6.0")
    name = stored(tmp_path, quantization_config=settings)
    with pytest.raises(WorkloadError, match=rf"is quantised \({method}\)") as raised:
        on_meta({"model": {"id": name}})
    assert raised.value.key == "model.config.quantization_config"
    on_meta({"model": {"id": name, "config": {"quantization_config": None}}})
    with pytest.raises(WorkloadError, match="is quantised"):
        on_meta({"model": {**SMALL, "config": {**SMALL["config"], "quantization_config": settings}}})


@pytest.mark.parametrize(
    ("settings", "gpu", "reason"),
    [
        ({"quant_method": "mxfp4"}, "h100", "because kernels cannot be imported here"),
        ({"quant_method": "mxfp4", "dequantize": True}, "h100", "as the configuration says"),
        ({"quant_method": "fp8"}, "a100-80gb", "because A100 .* has no kernels for it"),
    ],
)
def test_weights_that_transformers_dequantises_are_dense_with_a_note(
    tmp_path: Path, settings: dict[str, Any], gpu: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "version_of", lambda library: None if library == "kernels" else "3.6.0")
    dense = on_meta({"model": {"id": stored(tmp_path, dtype="bfloat16")}})
    name = stored(tmp_path, dtype="bfloat16", quantization_config=settings)
    model = on_meta({"model": {"id": name}, "gpu": gpu})
    assert [p.shape for p in model.parameters()] == [p.shape for p in dense.parameters()]
    assert re.search(f"dequantised while it is loaded, {reason}", model_notes(model)[-1])


def test_freeze_matches_patterns(describe: Any) -> None:
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
        assert lengths(describe(data={}), clip).sequence == 77
        assert lengths(describe(data={}), llama).sequence == 512
        with pytest.raises(WorkloadError, match=r"data\.sequence_length: 1024 is longer than the 512"):
            build_model(describe(data={"sequence_length": 1024}))
        with pytest.raises(WorkloadError, match=r"data\.target_length: 449"):
            build_model(describe("WhisperForConditionalGeneration", data={"target_length": 449}))
    beyond = describe(data={"sequence_length": 4096}, name="LlamaForCausalLM").data
    assert "4096" in (sequence_note(beyond, llama) or "")
    assert sequence_note(describe(data={"sequence_length": 64}).data, llama) is None


@pytest.mark.parametrize(
    ("config", "data", "target"),
    [
        ({"vocab_size": 32}, {}, 150),
        ({"vocab_size": 1025}, {}, 35),
        ({"vocab_size": 32}, {"sequence_length": 40}, 40),
        ({"vocab_size": 32}, {"sequence_length": 40, "target_length": 20}, 20),
    ],
)
def test_a_transcript_is_as_long_as_what_is_spoken(config: Any, data: Any, target: int) -> None:
    mapping = {"model": {"class": "Wav2Vec2ForCTC", "config": {**config, "num_hidden_layers": 1}}, "data": data}
    assert lengths(Workload.model_validate(mapping), on_meta(mapping)).target == target


def test_a_factory_must_return_a_module(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text("def build():\n    return 3\n")
    with pytest.raises(FactoryError, match=r"must return an nn\.Module, not a int"):
        on_meta({"model": {"factory": f"{file}:build"}})


@pytest.mark.parametrize("depth", [-2, "many", 1.5])
def test_an_impossible_number_of_layers_is_refused(depth: object) -> None:
    with pytest.raises(WorkloadError, match="must be a number of layers"):
        on_meta({"model": {"id": "gpt2", "config": {"n_layer": depth}}})


def test_values_of_a_part_overlay_what_the_class_sets_for_it() -> None:
    config = {"vision_config": {"num_hidden_layers": 2}, "text_config": {"num_hidden_layers": 1}}
    spec = ModelSpec.model_validate({"class": "LlavaForConditionalGeneration", "config": config})
    built = build_configuration(spec)
    assert (built.vision_config.image_size, built.vision_config.num_hidden_layers) == (336, 2)
    other = {"vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 2}}
    spec = ModelSpec.model_validate({"class": "LlavaForConditionalGeneration", "config": other})
    assert build_configuration(spec).vision_config.image_size == 224


def test_lists_by_layer_of_a_part_follow_its_depth() -> None:
    config = {"text_config": {"num_hidden_layers": 4}}
    spec = ModelSpec.model_validate({"class": "Qwen3_5ForConditionalGeneration", "config": config})
    assert len(build_configuration(spec).text_config.layer_types) == 4


def test_layers_that_would_take_hours_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"n_layer: 100,000 layers would take hours"):
        on_meta({"model": {"id": "gpt2", "config": {"n_layer": 100_000}}})
    with pytest.raises(WorkloadError, match=r"n_layer: 100,000 layers would take hours"):
        on_meta({"model": {"id": stored(tmp_path, n_layer=100_000)}})


def test_a_transformers_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("training.process", "catalog.versions"):
        monkeypatch.setattr(f"trainatomy.{module}.version_of", lambda name: "5.0.0")
    with pytest.raises(MissingLibrary, match=r"needs transformers 5\.1 or later, found 5\.0\.0"):
        process.preload(Workload.from_mapping({"model": {"id": "gpt2"}}))


def test_the_oldest_transformers_is_what_the_package_declares() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"transformers>={version_text(transformers_since('dtype_plans'))}" in project["dependencies"]
