"""Models of scripts that accelerate's hooks spread over GPU and host."""

from __future__ import annotations

import pytest
from script_types import RunScript

from trainatomy.results.prediction import Prediction
from trainatomy.scripts.job import Outcome

SPREAD = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", device_map="auto", max_memory={memory})
"""
PROMPT = (
    SPREAD
    + """
model.requires_grad_({trained})
prompt = torch.nn.Parameter(torch.randn(1, 8, 768, device="cuda"))
optimizer = torch.optim.AdamW([prompt])
for _ in range(5):
    inputs = torch.cat([prompt, torch.randn(1, 24, 768, device="cuda")], 1)
    model(inputs_embeds=inputs, labels=torch.ones(1, 32, dtype=torch.long, device="cuda")).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
LITTLE, ALL = '{0: "200MiB", "cpu": "10GiB"}', '{0: "2GiB", "cpu": "10GiB"}'
WEIGHTS = 497_759_232


def predicted(outcome: Outcome) -> Prediction:
    assert outcome.message == ""
    assert outcome.prediction is not None
    return outcome.prediction


def copied(found: Prediction) -> float:
    assert found.time is not None
    return found.time.step_seconds


def test_what_max_memory_leaves_out_is_copied_for_each_forward_pass(run_script: RunScript) -> None:
    whole, spread = (
        predicted(run_script(PROMPT.replace("{memory}", memory).replace("{trained}", "False")))
        for memory in (ALL, LITTLE)
    )
    assert whole.memory.model_bytes > WEIGHTS > 2.5 * spread.memory.model_bytes > 0
    assert spread.memory.components.weights == pytest.approx(WEIGHTS, rel=0.05)  # backward needs them all
    assert copied(spread) > 1.5 * copied(whole)
    assert not any("not trained" in note for note in spread.notes)


def test_a_model_that_is_whole_on_the_host_is_computed_on_the_gpu(run_script: RunScript) -> None:
    found = predicted(
        run_script(
            """
import torch
from accelerate import cpu_offload
from transformers import GPT2Config, GPT2LMHeadModel
model = cpu_offload(GPT2LMHeadModel(GPT2Config(n_layer=2)), torch.device("cuda"))
ids = torch.ones(2, 32, dtype=torch.long, device="cuda")
for _ in range(3):
    model(input_ids=ids, labels=ids).loss.backward()
"""
        )
    )
    assert found.memory.model_bytes == 0
    assert found.memory.components.weights > 4 * 50_257 * 768


def test_weights_that_hooks_bring_are_not_trained(run_script: RunScript) -> None:
    found = predicted(run_script(PROMPT.replace("{memory}", LITTLE).replace("{trained}", "True")))
    assert any("so that they are not trained" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SPREAD.replace("{memory}", LITTLE) + "model.to('cuda')", "You can't move a model that has some modules offl"),
        (SPREAD.replace("{memory}", '{0: "200MiB", "cpu": "100MiB"}'), "offloading to disk is not simulated"),
    ],
)
def test_what_fails_on_a_gpu_or_is_not_simulated_is_named(run_script: RunScript, text: str, message: str) -> None:
    outcome = run_script(text)
    assert outcome.prediction is None
    assert message in outcome.message


def test_weights_on_the_host_meet_no_tensor_of_the_gpu(run_script: RunScript) -> None:
    text = """
import torch
layers = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8)
layers[1](layers[0](torch.ones(2, 8, device="cuda")))
"""
    assert "tensors of the CPU and of the GPU" in run_script(text).message
