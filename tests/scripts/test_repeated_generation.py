"""A script that generates for each step: calls that are alike are copies of the first, and others are executed."""

from __future__ import annotations

import pytest
from script_types import RunScript

from trainatomy.simulator.generation import RepeatedGeneration

SCRIPT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=200, eos_token_id=1, bos_token_id=1, pad_token_id=0)
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    prompts = torch.full((2, 8), 5 + step)
    {change}
    with torch.no_grad():
        tokens = model.generate(prompts.cuda(), max_new_tokens=6, do_sample=True)
    ended = (tokens == 1).any(dim=1).tolist()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("change", "copies"),
    [
        ("pass", 3),
        ("prompts[0, 0] = 1 if step == 2 else 5", 1),  # a special token
        ("prompts = prompts[:, : 8 - step]", 0),
        ("model.eval()", 0),
        ("model.transformer.drop.p = step / 10", 0),
        ("torch.rand(1)", 3),
        ("model.register_buffer(f'more{step}', torch.ones(8).cuda())", 0),
    ],
)
def test_calls_that_are_alike_are_copied(
    change: str, copies: int, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = 0
    original = RepeatedGeneration._write_again

    def counted(*arguments: object) -> object:
        nonlocal found
        found += 1
        return original(*arguments)  # type: ignore[arg-type]

    text = SCRIPT.format(change=change)
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedGeneration, "_write_again", counted)
        copied = run_script(text, steps=4).prediction
    assert found == copies
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedGeneration, "repeat", lambda *_: None)
        whole = run_script(text, steps=4).prediction
    assert copied is not None
    assert whole is not None
    assert copied.memory == whole.memory
    assert copied.time == whole.time
    assert copied.script == whole.script


TURNS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Online(Trainer):
    def _prepare_inputs(self, inputs):
        prompts = super()._prepare_inputs(inputs)["input_ids"]
        with torch.no_grad():
            tokens = self.model.generate(prompts, max_new_tokens=6, do_sample=True)
        return {"input_ids": tokens, "labels": tokens}

config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=200, eos_token_id=1, bos_token_id=1, pad_token_id=0)
arguments = TrainingArguments("out", per_device_train_batch_size=2, report_to=[], gradient_accumulation_steps=2)
Online(GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": [5] * 8}] * 64).train()
"""


def test_a_trainers_turn_after_the_last_step_does_not_begin(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    original = RepeatedGeneration.repeat

    def counted(*arguments: object) -> object:
        nonlocal turns
        turns += 1
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RepeatedGeneration, "repeat", counted)
    run = run_script(TURNS, steps=3).prediction
    assert run is not None
    assert run.script is not None
    assert run.script.steps == 3
    assert turns == 3 * 2
