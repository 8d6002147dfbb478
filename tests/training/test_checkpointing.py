"""Checkpointing of every n-th layer: which layers recompute, the same losses, and what cannot be done."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trainatomy.integrations
from trainatomy.errors import WorkloadError
from trainatomy.integrations import CheckpointEvery, checkpoint_every
from trainatomy.training.checkpointing import checkpointed_every, checkpointed_layers
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run

LAYERS = 5
DEEP = {
    "BertForSequenceClassification": {"num_hidden_layers": LAYERS},
    "LlamaForCausalLM": {"num_hidden_layers": LAYERS},
    "GPT2LMHeadModel": {"n_layer": LAYERS},
    "T5ForConditionalGeneration": {"num_layers": 3, "num_decoder_layers": 2},
}
LORA = {"lora": {"r": 2, "target_modules": ["q_proj"]}}


def deep(describe: Any, name: str, every: int = 1, *, model: Any = None, kwargs: Any = None, **sections: Any) -> Any:
    """Describe a training of five layers in which every n-th recomputes; 0 switches checkpointing off."""
    base = describe(name)
    config = {**base.model.config, **DEEP[name]}
    train = {"gradient_checkpointing": every > 0, "gradient_checkpointing_every": every or 1}
    if kwargs is not None:
        train["gradient_checkpointing_kwargs"] = kwargs
    return describe(name, model={"config": config, **(model or {})}, train=train, **sections)


def called_part(layer: nn.Module) -> nn.Module:
    """Return the first module that a layer calls, whose hooks run in recomputation with any release of transformers."""
    return next(part for part in layer.modules() if part is not layer and not isinstance(part, nn.ModuleList))


def trained(workload: Any) -> tuple[list[float], list[int]]:
    """Train two steps on the CPU and return the losses, and the numbers of the layers that recomputed in the last."""
    torch.manual_seed(0)
    model = build_model(workload)
    parts = [called_part(layer) for layer in checkpointed_layers(model)]
    calls: list[int] = []
    losses: list[float] = []

    def begin(module: Any, arguments: Any) -> None:
        if torch._C._current_graph_task_id() == -1 and module is parts[0]:
            calls.clear()
        if torch._C._current_graph_task_id() != -1:
            calls.append(parts.index(module))

    for part in parts:
        part.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda module, arguments, outputs: losses.append(outputs.loss.item()))
    run(workload, model, device="cpu", steps=2, observer=Observer())
    return losses, sorted(calls)


@pytest.fixture(scope="module")
def plain() -> Callable[[Any], list[float]]:
    """Return a function that gives the losses of a training without recomputation, which runs once."""
    known: dict[str, list[float]] = {}

    def losses(workload: Any) -> list[float]:
        if workload.digest() not in known:
            known[workload.digest()], recomputed = trained(workload)
            assert recomputed == []
        return known[workload.digest()]

    return losses


EVERY = (1, 2, 3, 7)
CASES = [
    (loop, name, EVERY[(place + 2 * (loop == "pytorch")) % len(EVERY)])
    for place, name in enumerate(DEEP)
    for loop in ("trainer", "pytorch")
]
"""Each model with both loops, which together see every distance."""


@pytest.mark.parametrize(("loop", "name", "every"), CASES)
def test_every_nth_layer_recomputes_and_the_losses_stay(
    describe: Any, plain: Callable[[Any], list[float]], loop: str, name: str, every: int
) -> None:
    losses, recomputed = trained(deep(describe, name, every, loop=loop))
    assert recomputed == list(range(0, LAYERS, every)) and len(recomputed) == math.ceil(LAYERS / every)
    assert losses == pytest.approx(plain(deep(describe, name, 0, loop=loop)), rel=1e-6)  # a CPU may round differently


@pytest.mark.parametrize("loop", ["trainer", "pytorch"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_with_adapters_and_both_kinds_of_checkpointing(
    describe: Any, plain: Callable[[Any], list[float]], loop: str, reentrant: bool, model: Any
) -> None:
    workload = deep(describe, "LlamaForCausalLM", 2, loop=loop, model=model, kwargs={"use_reentrant": reentrant})
    losses, recomputed = trained(workload)
    assert recomputed == [0, 2, 4]
    assert losses == pytest.approx(plain(deep(describe, "LlamaForCausalLM", 0, loop=loop, model=model)), rel=1e-6)


def test_the_layers_are_those_that_transformers_chooses(describe: Any) -> None:
    for name in DEEP:
        ours, theirs = (build_model(deep(describe, name)) for _ in range(2))
        ours.gradient_checkpointing_enable()
        checkpoint_every(ours, 2)
        try:
            theirs.gradient_checkpointing_enable(every_n_layers=2)
        except TypeError:
            pytest.skip("transformers before 5.16 checkpoints every layer or none")
        flags = [[getattr(m, "gradient_checkpointing", None) for m in model.modules()] for model in (ours, theirs)]
        assert flags[0] == flags[1]


def test_the_state_of_a_model_is_recognised(describe: Any) -> None:
    model = build_model(deep(describe, "LlamaForCausalLM"))
    assert checkpointed_every(model) is None
    model.gradient_checkpointing_enable()
    for n in (1, 2, 3, 4, 5):
        checkpoint_every(model, n)
        assert checkpointed_every(model) == n
    checkpointed_layers(model)[1].gradient_checkpointing = True
    assert checkpointed_every(model) is None


def test_the_callback_thins_what_the_trainer_switched_on(describe: Any, tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from trainatomy.training.batch import build_dataset

    workload = deep(describe, "BertForSequenceClassification")
    model = build_model(workload)
    dataset = build_dataset(workload, model, 4, None)
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 1, "report_to": [], "disable_tqdm": True}
    for checkpoints in (True, False):
        arguments = TrainingArguments(gradient_checkpointing=checkpoints, save_strategy="no", **settings)
        callbacks = [CheckpointEvery(3)]
        trainer = Trainer(model, arguments, dataset.collate, dataset, callbacks=callbacks)
        if checkpoints:
            trainer.train()
            assert [layer.gradient_checkpointing for layer in checkpointed_layers(model)] == [
                True, False, False, True, False,
            ]  # fmt: skip
        else:
            model.gradient_checkpointing_disable()
            with pytest.raises(WorkloadError, match="gradient checkpointing is off: call"):
                trainer.train()


@pytest.mark.parametrize("loop", ["trainer", "pytorch"])
def test_a_model_without_layers_of_its_own_is_refused(
    describe: Any, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = describe("BertForSequenceClassification", loop=loop)
    workload = base.replace({"train.gradient_checkpointing": True, "train.gradient_checkpointing_every": 2})
    model = build_model(workload)
    monkeypatch.setattr("transformers.modeling_layers.GradientCheckpointingLayer", type("Other", (), {}))
    with pytest.raises(WorkloadError, match="BertForSequenceClassification cannot be switched one by one") as raised:
        run(workload, model, device="cpu", steps=1, observer=Observer())
    assert raised.value.key == "train.gradient_checkpointing_every"
    whole = workload.replace("train.gradient_checkpointing_every", 1)
    run(whole, model, device="cpu", steps=1, observer=Observer())


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_n_is_a_count(describe: Any, n: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        checkpoint_every(build_model(describe()), n)


def test_the_helpers_are_public() -> None:
    assert all(getattr(trainatomy.integrations, name).__doc__ for name in trainatomy.integrations.__all__)
    with pytest.raises(AttributeError, match="no attribute 'checkpoint_each'"):
        trainatomy.integrations.checkpoint_each  # noqa: B018
