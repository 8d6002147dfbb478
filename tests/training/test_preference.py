"""Steps of frameworks' trainers on preferences, on the CPU: real steps of a tiny model."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from trainatomy.errors import WorkloadError
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run
from trainatomy.workload import Workload
from trainatomy.workload.preference import FRAMEWORKS, WITHOUT_REFERENCE, PreferenceSpec

LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 500, "eos_token_id": 1,
}  # fmt: skip
CLASSIFIER = {"class": "LlamaForSequenceClassification", "config": {**LLAMA, "num_labels": 1, "pad_token_id": 0}}
COMBINATIONS = [(name, loss) for name, framework in FRAMEWORKS.items() for loss in sorted(framework.losses)]


@pytest.fixture(autouse=True)
def _axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put functions for the CPU in the place of axolotl's kernels."""

    def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=logits).entropy()

    module = ModuleType("axolotl.monkeypatch.trainer.utils")
    vars(module).update(selective_log_softmax=selective_log_softmax, entropy_from_logits=entropy_from_logits)
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Events(Observer):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self.evaluations = 0

    def loaded(self, model: Any) -> None:
        self.dtypes["trained"] = next(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)

    def reference_loaded(self, model: Any) -> None:
        self.dtypes["reference"] = next(model.parameters()).dtype

    def loss_kept(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))

    def evaluation_end(self) -> None:
        self.evaluations += 1

    def evaluates_after(self, step: int) -> bool:
        return step == 0


def described(trainer: str, loss: str, **sections: Any) -> Workload:
    spec = PreferenceSpec(trainer=trainer, loss_type=loss)  # type: ignore[arg-type]
    model = CLASSIFIER if spec.is_of_classifier else {"class": "LlamaForCausalLM", "config": LLAMA}
    train = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}
    return Workload.from_mapping(
        {
            "loop": "preference",
            "preference": {"trainer": trainer, "loss_type": loss, **sections.get("preference", {})},
            "model": {**model, **sections.get("model", {})},
            "data": {"sequence_length": 16, "prompt_length": 6},
            "train": {**train, **sections.get("train", {})},
        }
    )


def trained(*named: str, **sections: Any) -> Events:
    """Train two steps of two micro-batches."""
    workload, events = described(*named, **sections), Events()
    torch.manual_seed(0)
    run(workload, build_model(workload), device="cpu", steps=2, observer=events)
    return events


@pytest.mark.parametrize(("trainer", "loss"), COMBINATIONS)
def test_every_loss_trains_with_a_second_model_where_it_compares(trainer: str, loss: str) -> None:
    events = trained(trainer, loss)
    assert len(events.losses) == 4 and all(map(math.isfinite, events.losses))
    assert ("reference" in events.dtypes) is (loss not in WITHOUT_REFERENCE)


@pytest.mark.parametrize("trainer", FRAMEWORKS)
def test_the_loss_of_equal_answers_is_that_of_a_tie(trainer: str) -> None:
    """Before the first update model and reference agree, so that the sigmoid's loss is log 2 (here of each half)."""
    first = trained(trainer, "sigmoid").losses[0]
    assert first == pytest.approx(math.log(2) / 2, rel=1e-5)


@pytest.mark.parametrize(
    "adapters",
    [
        {"lora": {"r": 2, "target_modules": "all-linear"}},
        {"peft": {"peft_type": "OFT", "oft_block_size": 8, "target_modules": ["q_proj"]}},
    ],
    ids=["lora", "oft"],
)
def test_with_adapters_the_model_without_them_is_the_reference(adapters: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    events = trained("llamafactory", "sigmoid", model=adapters)
    assert "reference" not in events.dtypes and all(map(math.isfinite, events.losses))


def test_axolotl_keeps_named_weights_of_the_reference_in_float32_too() -> None:
    model = {"dtype": "bfloat16", "float32_parameters": ["model.embed_tokens.weight"]}
    for trainer, dtype in (("axolotl", torch.float32), ("llamafactory", torch.bfloat16)):
        assert trained(trainer, "sigmoid", model=model, train={"bf16": True}).dtypes["reference"] == dtype


def test_the_reference_keeps_the_dtype_of_the_checkpoint() -> None:
    events = trained("llamafactory", "sigmoid", model={"dtype": "bfloat16", "trainable_dtype": "float32"})
    assert events.dtypes == {"trained": torch.float32, "reference": torch.bfloat16}


@pytest.mark.parametrize(("trainer", "loss"), [("llamafactory", "sigmoid"), ("swift", "kto"), ("swift", "reward")])
def test_an_evaluation_computes_the_loss(trainer: str, loss: str) -> None:
    settings = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}
    assert trained(trainer, loss, train=settings).evaluations == 1


def test_the_loss_of_fine_tuning_is_added() -> None:
    plain, more = (trained("swift", "sigmoid", preference={"rpo_alpha": alpha}).losses[0] for alpha in (0.0, 1.0))
    assert more > plain + 1  # the mean of a token is near the logarithm of the vocabulary, 6.2, of each half


def test_a_reward_model_is_the_one_of_its_framework() -> None:
    workload = described("swift", "reward", model={"class": "LlamaForCausalLM", "config": LLAMA})
    with pytest.raises(WorkloadError, match="loop: preference trains a classifier"):
        run(workload, build_model(workload), device="cpu", steps=1, observer=Events())
