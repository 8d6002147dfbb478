"""bitsandbytes as other libraries look for it: every usual probe finds it as on a GPU's machine."""

from __future__ import annotations

import pytest
from script_types import RunScript

from trainatomy.catalog.architectures import architecture, original_name, quantization_of_copy

pytest.importorskip("bitsandbytes")

PROBES = """
import importlib.metadata, importlib.util
import torch
{first}
import bitsandbytes as bnb
import bitsandbytes.functional
assert importlib.metadata.version("bitsandbytes") and importlib.util.find_spec("bitsandbytes")
from transformers.utils import is_bitsandbytes_available
assert is_bitsandbytes_available()
library = bnb.functional.lib
assert library is bnb.cextension.lib and library.compiled_with_cuda
# as unsloth/bnb_availability.py
for name in ("cdequantize_blockwise_fp32", "cdequantize_blockwise_bf16_nf4", "cgemm_4bit_inference_naive_bf16"):
    assert hasattr(getattr(library, name), "restype")
weight = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
out = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
get_ptr = bnb.functional.get_ptr
pointers = get_ptr(None), get_ptr(A=packed), get_ptr(state.absmax), get_ptr(out)
library.cdequantize_blockwise_bf16_nf4(*pointers, 64, out.numel(), 0)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    model(out.float()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("first", ["", "import transformers, peft"])
def test_the_library_of_bitsandbytes_is_loaded(run_script: RunScript, first: str) -> None:
    found = run_script(PROBES.format(first=first))
    assert found.message == ""


@pytest.mark.parametrize(
    ("name", "original", "is_packed"),
    [
        ("unsloth/Llama-3.2-1B-Instruct", "Llama-3.2-1B-Instruct", False),
        ("unsloth/Qwen2.5-0.5B-Instruct-bnb-4bit", "Qwen2.5-0.5B-Instruct", True),
        ("unsloth/qwen2.5-0.5b-unsloth-bnb-4bit", "qwen2.5-0.5b", True),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", False),
    ],
)
def test_copies_of_models_are_known_by_the_originals(name: str, original: str, is_packed: bool) -> None:
    assert original_name(name) == original
    assert architecture(name) is not None
    assert (quantization_of_copy(name) is not None) == is_packed


@pytest.mark.parametrize(("options", "is_left_out"), [("", True), (", quantization_config=settings", False)])
def test_quantised_weights_that_are_asked_for_and_not_made_are_noted(
    run_script: RunScript, options: str, is_left_out: bool
) -> None:
    found = run_script(
        f"""
        import torch
        from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel
        settings = BitsAndBytesConfig(load_in_4bit=True)
        config = GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100)
        model = GPT2LMHeadModel.from_pretrained("nobody/tiny", config=config, dtype=torch.bfloat16{options}).cuda()
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.is_floating_point()], 0.1)
        for _ in range(5):
            model(torch.ones(2, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    assert found.prediction is not None, found.message
    assert any("no layer has them" in note for note in found.prediction.notes) == is_left_out


def test_a_module_keeps_its_signature_and_may_take_any_name(run_script: RunScript) -> None:
    found = run_script(
        """
        import inspect
        import torch
        class Model(torch.nn.Linear):
            def forward(self, module, self_weight=None):
                return super().forward(module)
        assert "args" in inspect.signature(torch.nn.Module.__call__).parameters
        model = Model(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            model(module=torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    assert found.message == ""
