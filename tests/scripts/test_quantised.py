"""Scripts that load quantised weights agree to the byte with the workload that says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from script_types import RunScript

import trainatomy
from trainatomy.results.prediction import Prediction
from trainatomy.scripts.job import Outcome

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
SCRIPT = """
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoConfig, BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.full((64,), 7)
        return {{"input_ids": ids, "labels": ids}}


state = PartialState()
config = AutoConfig.for_model(**{config})
model = LlamaForCausalLM.from_pretrained(
    "nobody/tiny-llama", config=config, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig({settings})
)
assert state.num_processes == 1  # loading leaves what the script has of accelerate
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
arguments = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, optim="{optim}", report_to="none",
                              logging_steps=1, gradient_checkpointing=True)
Trainer(model, arguments, train_dataset=Rows()).train()
"""


def components(prediction: Prediction) -> dict[str, int]:
    return prediction.memory.components.as_dict()


def script(settings: str, optim: str) -> str:
    return SCRIPT.format(config=CONFIG, settings=settings, optim=optim)


@pytest.mark.parametrize(
    ("settings", "quantization", "optim"),
    [
        (
            "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype='bfloat16'",
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
            "paged_adamw_8bit",
        ),
        ("load_in_8bit=True", {"load_in_8bit": True}, "adamw_torch"),
    ],
    ids=["4 bits", "8 bits"],
)
def test_a_quantised_model_and_its_workload(
    run_script: RunScript, settings: str, quantization: dict[str, Any], optim: str
) -> None:
    found = run_script(script(settings, optim)).prediction
    assert found is not None
    expected = trainatomy.predict(
        trainatomy.Workload.from_mapping(
            {
                "model": {
                    "config": CONFIG,
                    "class": "LlamaForCausalLM",
                    "dtype": "bfloat16",
                    "quantization": quantization,
                    "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
                },
                "loop": "trainer",
                "gpu": "h100-sxm",
                "data": {"sequence_length": 64},
                "train": {
                    "per_device_train_batch_size": 2,
                    "bf16": True,
                    "gradient_checkpointing": True,
                    "optim": optim,
                },
            }
        )
    )
    for figure in ("peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes"):
        assert getattr(found.memory, figure) == getattr(expected.memory, figure), figure
    for component in ("weights", "optimizer_states", "gradients", "temporary"):
        assert components(found)[component] == components(expected)[component], component
    assert any("quantised weights" in note for note in found.notes)
    assert found.subject is not None and expected.subject is not None
    assert found.subject.quantization == expected.subject.quantization


FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("call", "train", "is_noted"),
    [
        ("(model)", {}, True),
        ("(model, use_gradient_checkpointing=False)", {"gradient_checkpointing": False}, False),
        ("(model)", {"gradient_checkpointing": True}, False),
    ],
    ids=["unsaid", "off", "on"],
)
def test_peft_switches_checkpointing_on_unless_it_is_told_not_to(
    run_script: RunScript, call: str, train: dict[str, Any], is_noted: bool
) -> None:
    text = script("load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype='bfloat16'", "adamw_torch")
    text = text.replace("_training(model)", f"_training{call}")
    if not train.get("gradient_checkpointing"):
        text = text.replace("gradient_checkpointing=True)", ")")
    found = run_script(text).prediction
    assert found is not None
    model = {"config": CONFIG, "class": "LlamaForCausalLM", "dtype": "bfloat16", "quantization": FOUR}
    lora = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
    expected = trainatomy.predict(
        trainatomy.Workload.from_mapping(
            {
                "model": {**model, "lora": lora},
                "gpu": "h100-sxm",
                "data": {"sequence_length": 64},
                "train": {"per_device_train_batch_size": 2, "bf16": True, "optim": "adamw_torch", **train},
            }
        )
    )
    assert found.memory.peak_allocated_bytes == expected.memory.peak_allocated_bytes
    assert found.memory.peak_reserved_bytes == expected.memory.peak_reserved_bytes
    noted = [note for note in expected.leading_notes if "prepare_model_for_kbit_training" in note]
    assert len(noted) == is_noted


def test_a_checkpoint_that_is_stored_quantised_and_its_workload(run_script: RunScript, tmp_path: Path) -> None:
    """A local folder with a configuration and without weights, as a hub's cache may hold it."""
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    text = script("load_in_4bit=True", "adamw_torch").replace("config = AutoConfig.for_model", "dict")
    text = text.replace('"nobody/tiny-llama", config=config', '"stored"').replace(
        "quantization_config=BitsAndBytesConfig(load_in_4bit=True)", "device_map='cuda'"
    )
    tmp_path.joinpath("stored").mkdir()
    content = {**CONFIG, "architectures": ["LlamaForCausalLM"], "quantization_config": stored}
    tmp_path.joinpath("stored", "config.json").write_text(json.dumps(content))
    found = run_script(text)
    assert found.prediction is not None, found.message
    expected = trainatomy.predict(
        trainatomy.Workload.from_mapping(
            {
                "model": {
                    "config": {**CONFIG, "quantization_config": stored},
                    "class": "LlamaForCausalLM",
                    "dtype": "bfloat16",
                    "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
                },
                "loop": "trainer",
                "gpu": "h100-sxm",
                "data": {"sequence_length": 64},
                "train": {
                    "per_device_train_batch_size": 2,
                    "bf16": True,
                    "gradient_checkpointing": True,
                    "optim": "adamw_torch",
                },
            }
        )
    )
    for component in ("weights", "optimizer_states", "gradients", "temporary"):
        assert components(found.prediction)[component] == components(expected)[component], component


def test_a_checkpoint_that_another_library_stored_is_refused_by_name(run_script: RunScript) -> None:
    text = script("load_in_4bit=True", "adamw_torch")
    text = text.replace(
        "AutoConfig.for_model(**", "AutoConfig.for_model(quantization_config={'quant_method': 'gptq'}, **"
    )
    assert "is stored quantised (gptq)" in run_script(text).message


def test_another_library_is_refused_by_name(run_script: RunScript) -> None:
    text = script("load_in_4bit=True", "adamw_torch")
    outcome: Outcome = run_script(text.replace("BitsAndBytesConfig(load_in_4bit=True)", "{'quant_method': 'awq'}"))
    assert "quantised by awq are not simulated" in outcome.message


def test_torchao_and_its_workload(run_script: RunScript) -> None:
    pytest.importorskip("torchao")
    text = script("load_in_4bit=True", "adamw_torch").replace(
        "BitsAndBytesConfig(load_in_4bit=True)", "TorchAoConfig(Int8WeightOnlyConfig())"
    )
    text = text.replace("import AutoConfig,", "import AutoConfig, TorchAoConfig,")
    found = run_script(
        text.replace("import torch", "import torch\nfrom torchao.quantization import Int8WeightOnlyConfig", 1)
    )
    assert found.prediction is not None, found.message
    expected = trainatomy.predict(
        trainatomy.Workload.from_mapping(
            {
                "model": {
                    "config": CONFIG,
                    "class": "LlamaForCausalLM",
                    "dtype": "bfloat16",
                    "quantization": {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"},
                    "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
                },
                "loop": "trainer",
                "gpu": "h100-sxm",
                "data": {"sequence_length": 64},
                "train": {
                    "per_device_train_batch_size": 2,
                    "bf16": True,
                    "gradient_checkpointing": True,
                    "optim": "adamw_torch",
                },
            }
        )
    )
    for figure in ("peak_allocated_bytes", "peak_requested_bytes", "peak_reserved_bytes"):
        assert getattr(found.prediction.memory, figure) == getattr(expected.memory, figure), figure


def test_weights_that_are_dequantised_while_they_are_loaded_are_trained(run_script: RunScript) -> None:
    stored = {"quant_method": "mxfp4"}
    text = script("load_in_4bit=True", "adamw_torch").replace("BitsAndBytesConfig(load_in_4bit=True)", "DEQUANTISED")
    text = text.replace("AutoConfig.for_model(**", f"AutoConfig.for_model(quantization_config={stored}, **")
    packed = run_script(text.replace("DEQUANTISED", "None"))
    assert "is stored quantised (mxfp4)" in packed.message
    text = text.replace("DEQUANTISED", "Mxfp4Config(dequantize=True)").replace(
        "import AutoConfig,", "import AutoConfig, Mxfp4Config,"
    )
    found = run_script(text)
    assert found.prediction is not None, found.message
    plain = run_script(
        script("load_in_4bit=True", "adamw_torch").replace("BitsAndBytesConfig(load_in_4bit=True)", "None")
    )
    assert plain.prediction is not None
    assert found.prediction.memory.peak_allocated_bytes == plain.prediction.memory.peak_allocated_bytes
    assert any("is stored quantised" in note for note in found.prediction.notes)


@pytest.mark.parametrize("config", [None, "{'quant_method': 'bitsandbytes', 'load_in_4bit': True}"])
def test_the_layers_tell_how_they_are_quantised(run_script: RunScript, config: str | None) -> None:
    """Whatever the model's configuration says: litgpt's have none, Unsloth's is a dictionary."""
    found = run_script(f"""
        import torch
        from bitsandbytes.nn import Linear4bit
        from types import SimpleNamespace

        class Own(Linear4bit):
            __module__ = "lightning"

        model = torch.nn.Sequential(Own(256, 256, quant_type="nf4"), torch.nn.Linear(256, 1)).cuda()
        model[0].requires_grad_(False)
        model.config = SimpleNamespace(quantization_config={config})
        optimizer = torch.optim.AdamW(model[1].parameters())
        for _ in range(3):
            model(torch.ones(8, 256, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    assert found.prediction is not None and found.prediction.subject is not None, found.message
    assert found.prediction.subject.quantization == "nf4"
