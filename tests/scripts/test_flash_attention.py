"""flash-attn in scripts: found by every usual probe where a script asks for it, and as a workload predicts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from executed import predicted
from script_types import RunScript

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import SimulationError
from trainatomy.scripts.run import explained
from trainatomy.scripts.standins.flash_attention import names_flash_attention
from trainatomy.workload.schema import Workload

PROBES = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("flash_attn") is not None
assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3"
import flash_attn
assert flash_attn.__version__ == "2.8.3"
from flash_attn.flash_attn_interface import flash_attn_func
from transformers.utils import is_flash_attn_2_available
assert is_flash_attn_2_available()
"""
LOOP = """
import torch
model = torch.nn.Linear(64, 3 * 64, dtype=torch.bfloat16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
lengths = torch.tensor([0, 40, 128], dtype=torch.int32, device="cuda")
for _ in range(5):
    qkv = model(torch.ones(2, 64, 64, device="cuda", dtype=torch.bfloat16)).view(2, 64, 3, 4, 16)
    out = ATTENTION
    assert out.numel() == 2 * 64 * 64, out.shape
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CALLS = {
    "flash_attn_func": "flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)",
    "by name": "flash_attn.flash_attn_func(q=qkv[:, :, 0], k=qkv[:, :, 1], v=qkv[:, :, 2], dropout_p=0.1)",
    "qkvpacked": "flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)",
    "kvpacked": "flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:])",
    "varlen": "flash_attn.flash_attn_varlen_func(*qkv.flatten(0, 1).unbind(1), lengths, lengths, 88, 88)",
    "varlen qkvpacked": "flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), lengths, 88)",
    "varlen kvpacked": "flash_attn.flash_attn_varlen_kvpacked_func("
    "qkv.flatten(0, 1)[:, 0], qkv.flatten(0, 1)[:, 1:], lengths, lengths, 88, 88)",
}


def test_a_script_agrees_with_the_workload(run_script: RunScript) -> None:
    config = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
              "vocab_size": 1000}  # fmt: skip
    found = run_script(
        f"""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**{config}), dtype=torch.bfloat16, attn_implementation="flash_attention_2"
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            ids = torch.randint(0, 1000, (2, 512)).cuda()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    expected = predicted(
        Workload.from_mapping(
            {
                "loop": "pytorch",
                "model": {
                    "class": "LlamaForCausalLM",
                    "config": config,
                    "dtype": "bfloat16",
                    "attn_implementation": "flash_attention_2",
                },
                "gpu": "h100-sxm",
                "data": {"sequence_length": 512},
                "train": {"per_device_train_batch_size": 2, "optim": "adamw_torch"},
            }
        )
    )
    assert found.message == ""
    assert found.prediction is not None
    activations = found.prediction.memory.components["activations"]
    assert activations == expected.memory.components["activations"]
    assert any("flash_attention_2 allocates" in one for one in found.prediction.notes)
    assert found.prediction.subject is not None
    assert found.prediction.subject.attention == "flash_attention_2"


@pytest.mark.parametrize("asked", [
    'LlamaConfig(**small, attn_implementation="flash_attention_2")',
    'LlamaConfig(**small)',
])  # fmt: skip
def test_every_way_to_ask_for_it(run_script: RunScript, asked: str) -> None:
    """In the configuration, and by ``set_attn_implementation``, with checkpoints that unpack saved tensors once."""
    found = run_script(
        f"""
        import torch
        from transformers import LlamaConfig, AutoModelForCausalLM
        small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
        model = AutoModelForCausalLM.from_config({asked}, dtype=torch.bfloat16).cuda()
        model.set_attn_implementation("flash_attention_2")
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            ids = torch.ones(2, 64, dtype=torch.long, device="cuda")
            model(input_ids=ids, labels=ids, attention_mask=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    assert found.message == ""
    assert found.prediction is not None
    assert any("flash_attention_2 allocates" in one for one in found.prediction.notes)
    assert found.prediction.subject is not None and found.prediction.subject.checkpointing == 1


@pytest.mark.parametrize("name", CALLS)
def test_functions_of_the_package_run(run_script: RunScript, name: str) -> None:
    found = run_script(PROBES + LOOP.replace("ATTENTION", CALLS[name]))
    assert found.message == ""
    assert "flash_attn" not in sys.modules


def test_padding_is_taken_out_and_put_back(run_script: RunScript) -> None:
    text = """
mask = torch.ones(2, 64, dtype=torch.long)
mask[1, 30:] = 0
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
def attend(qkv):
    tokens, indices, starts, longest, _ = unpad_input(qkv, mask.cuda())
    assert tokens.shape[0] == 94 and longest == 64
    out = flash_attn.flash_attn_varlen_qkvpacked_func(tokens, starts, longest)
    return pad_input(out, indices, 2, 64)
"""
    loop = LOOP.replace("import torch\n", "import torch\n" + text).replace("ATTENTION", "attend(qkv)")
    assert run_script(PROBES + loop).message == ""


def test_it_is_there_only_where_it_is_named(tmp_path: Path, run_script: RunScript) -> None:
    """Some frameworks choose it by themselves where it is installed."""
    file = tmp_path / "train.yaml"
    file.write_text("attn_implementation: flash_attention_2\n")
    script = tmp_path / "plain.py"
    script.write_text("SDPBackend.FLASH_ATTENTION\nattn_implementation='flash_attention_3'\n")
    assert names_flash_attention(["--config", str(file)], [])
    assert names_flash_attention([f"--config={file}"], [])
    assert names_flash_attention(["--attn_implementation", "flash_attention_2"], [])
    assert not names_flash_attention(["--lr", "1"], [script])
    probe = "import importlib.util\nname = 'flash' + '_' + 'attn'\nassert importlib.util.find_spec(name) is None\n"
    assert "ended without training" in run_script(probe).message


@pytest.mark.parametrize("name", [*read_yaml("cuda_only.yaml"), "flash_attn.layers.rotary", "apex.optimizers"])
def test_packages_of_cuda_kernels_are_refused_by_name(name: str) -> None:
    """Whether they are installed here or not: one that is not is what a laptop has."""
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    found = explained(error, "train.py")
    assert isinstance(found, SimulationError)
    assert f"train.py needs {name}, a package of CUDA kernels that are not simulated: " in str(found)
    assert "pip install" not in str(found)
