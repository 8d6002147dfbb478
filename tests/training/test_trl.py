"""TRL's trainers on the CPU: real steps of a tiny model, with observer events in the documented order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from trainatomy.training.lengths import orders, sample_lengths
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import Run, run
from trainatomy.training.trl import make_tokenizer, packed_samples, tokenised_samples, trained_batches
from trainatomy.workload import Workload

pytest.importorskip("trl")
pytest.importorskip("datasets")

LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 500, "eos_token_id": 1,
}  # fmt: skip
REWARD = {"class": "LlamaForSequenceClassification", "config": {**LLAMA, "num_labels": 1}}


class Events(Observer):
    def __init__(self) -> None:
        self.entries: list[str] = []
        self.losses: list[float] = []

    def loaded(self, model: Any) -> None:
        self.entries.append("loaded")

    def reference_loaded(self, model: Any) -> None:
        self.entries.append("reference loaded")

    def ready(self, model: Any, optimizer: Any) -> None:
        self.entries.append("ready")

    def step_begin(self, step: int) -> None:
        self.entries.append(f"step {step}")

    def generation_begin(self, tokens: int) -> None:
        self.entries.append(f"generate {tokens}")

    def generation_end(self) -> None:
        self.entries.append("generated")

    def micro_step_begin(self, micro_step: int) -> None:
        self.entries.append(f"micro {micro_step}")

    def forward_end(self) -> None:
        self.entries.append("forward end")

    def loss_kept(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))

    def micro_step_end(self, micro_step: int) -> None:
        self.entries.append(f"micro {micro_step} end")

    def optimizer_begin(self) -> None:
        self.entries.append("optimizer")


@pytest.mark.parametrize(
    ("loop", "data", "settings", "before", "of_a_step"),
    [
        ("sft", {"prompt_length": 4}, {}, [], []),
        ("dpo", {"prompt_length": 4}, {}, ["reference loaded"], []),
        ("kto", {"prompt_length": 4}, {}, ["reference loaded"], []),
        ("reward", {}, {}, [], []),
        ("grpo", {}, {"num_generations": 2, "max_completion_length": 3}, [], ["generate 3", "generated"]),
    ],
)
def test_the_observer_receives_all_events_in_order(
    loop: str, data: dict[str, Any], settings: dict[str, Any], before: list[str], of_a_step: list[str]
) -> None:
    train = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": False}
    workload = Workload.from_mapping(
        {
            "model": REWARD if loop == "reward" else {"class": "LlamaForCausalLM", "config": LLAMA},
            "loop": loop,
            "data": {"sequence_length": 8, **data},
            "train": train,
            "trl": settings,
        }
    )
    events = Events()
    torch.manual_seed(0)
    run(workload, build_model(workload), device="cpu", steps=2, observer=events)
    micro = [entry for i in range(2) for entry in (f"micro {i}", "forward end", f"micro {i} end")]
    steps = [entry for i in range(2) for entry in (f"step {i}", *of_a_step, *micro, "optimizer")]
    assert events.entries == ["loaded", *before, "ready", *steps]
    assert len(events.losses) == 4
    assert all(torch.tensor(events.losses).isfinite())


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        ({}, None),
        ({"completion_only_loss": True}, 3),
        ({"completion_only_loss": False}, 3),
        ({"pad_to_multiple_of": 16}, None),
        ({"packing_strategy": "bfd_split"}, None),
        ({"packing_strategy": "wrapped"}, None),
    ],
)
def test_packs_make_the_batches_that_trl_makes_of_the_samples(settings: dict[str, Any], prompt: int | None) -> None:
    from trl import SFTConfig, SFTTrainer

    workload = Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": LLAMA},
            "loop": "sft",
            "data": {
                "lengths": {"distribution": "uniform", "minimum": 5, "maximum": 50, "samples": 40, "orders": 1},
                "prompt_length": prompt,
            },
            "train": {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"},
            "trl": {"packing": True, "max_length": 64, **settings},
        }
    )
    model = build_model(workload)
    ours = trained_batches(Run(workload, model, "cpu", len(orders(workload)[0].steps), Observer()))
    shuffled = random.Random(0).sample(lengths := sample_lengths(workload), len(lengths))
    trainer = SFTTrainer(
        model,
        SFTConfig(packing=True, max_length=64, use_cpu=True, report_to="none", **settings),
        train_dataset=tokenised_samples(workload, model, shuffled),
        processing_class=make_tokenizer(model),
    )
    theirs = [dict(trainer.train_dataset[place : place + 2]) for place in range(0, 2 * len(ours), 2)]
    made = packed_samples(workload, model, ours)
    for place, columns in enumerate(theirs):
        wanted, found = (
            trainer.data_collator([dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)])
            for rows in (columns, made[2 * place : 2 * place + 2])
        )
        assert sizes_of(found) == sizes_of(wanted)
        assert int((found["labels"] != -100).sum()) == int((wanted["labels"] != -100).sum())


def sizes_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in batch.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("loop", ["sft", "dpo", "reward"])
def test_the_trainer_gets_batches_of_the_lengths_in_their_order(loop: str) -> None:
    """The tokens that TRL itself counts, and the widths of its batches."""
    lengths, widths, counted = [12, 40, 7, 9], [], []
    workload = Workload.from_mapping(
        {
            "model": REWARD if loop == "reward" else {"class": "LlamaForCausalLM", "config": LLAMA},
            "loop": loop,
            "data": {
                "lengths": {"histogram": dict.fromkeys(lengths, 1)},
                **({"prompt_length": 4} if loop == "dpo" else {}),
            },
            "train": {"per_device_train_batch_size": 2, "bf16": False, "train_sampling_strategy": "sequential"},
            "trl": {"pad_to_multiple_of": 8},
        }
    )
    model = build_model(workload)

    def note(module: Any, given: Any, named: dict[str, Any]) -> None:
        widths.append(tuple((*given, named.get("input_ids"))[0].shape))
        counted.append(int(named["attention_mask"].sum()))

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    run(workload, model, device="cpu", steps=2, observer=Observer())
    rows, passes = (2 if loop == "sft" else 4), (2 if loop == "dpo" else 1)  # also of the reference model
    assert widths == [(rows, 40)] * passes + [(rows, 16)] * passes
    assert counted == [rows // 2 * (12 + 40)] * passes + [rows // 2 * (7 + 9)] * passes


@pytest.mark.parametrize(
    ("installed", "imported"),
    [({"peft", "bitsandbytes"}, ["bitsandbytes"]), ({"bitsandbytes"}, []), ({"peft"}, []), (set(), [])],
)
def test_bitsandbytes_is_loaded_where_peft_would_load_it(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], imported: list[str]
) -> None:
    """TRL empties the cache if bitsandbytes is loaded, and that must not depend on how the process was started."""

    def stop(*arguments: Any, **keywords: Any) -> None:
        raise InterruptedError

    found: list[str] = []
    monkeypatch.setattr("trainatomy.training.trl.version_of", lambda name: "1.0" if name in installed else None)
    monkeypatch.setattr("trainatomy.training.trl.import_module", found.append)
    monkeypatch.setattr("trainatomy.training.run.training_arguments", stop)
    for offloads in (False, True):
        described = {"model": {"class": "LlamaForCausalLM", "config": LLAMA}, "data": {"sequence_length": 16}}
        workload = Workload.from_mapping(described | {"loop": "sft", "trl": {"activation_offloading": offloads}})
        with pytest.raises(InterruptedError):
            run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())
        assert found == (imported if offloads else [])
