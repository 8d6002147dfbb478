"""The line that says what was predicted: every kind of training, and what several have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainatomy.reporters.html.page import page_of
from trainatomy.reporters.json import to_json
from trainatomy.reporters.subject_sentences import optimizer_name, shared_subject, subject_line
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.fit import fit_page
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.fit import Fit
from trainatomy.results.prediction import Prediction, Subject
from trainatomy.workload.arguments import arguments

BERT = Subject(
    models=("BertForMaskedLM",),
    mode="training",
    loop="trainer",
    weights_dtype="float32",
    batch_size=16,
    optimizer="adamw_torch_fused",
    attention="sdpa",
    inputs={"input_ids": (512,), "labels": (512,)},
)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BertForMaskedLM · fp32 · AdamW (fused) · SDPA · Trainer · 16 × 512 tokens": ({}, {}),
    "BertForMaskedLM · LoRA r 16 · bf16 weights · paged 8-bit AdamW · SDPA (flash) · Trainer · 16 × 512 tokens": (
        {
            "lora_rank": 16,
            "weights_dtype": "bfloat16",
            "optimizer": "paged_adamw_8bit",
            "attention_kernels": ("flash",),
        },
        {},
    ),
    "BertForMaskedLM · 4-bit NF4 weights, bf16 autocast · AdamW (fused) · SDPA · Trainer · 16 × 512 tokens": (
        {"quantization": "nf4", "autocast": "bf16"},
        {},
    ),
    "BertForMaskedLM · bf16 autocast over fp32 weights · AdamW (fused) · SDPA · gradient checkpointing · "
    "Trainer · 16 × 512 tokens × 4 accumulation steps": (
        {"autocast": "bf16", "checkpointing": 1, "accumulation_steps": 4},
        {},
    ),
    "BertForMaskedLM · fp32 · AdamW (fused) · SDPA · Trainer · FSDP2, 8 GPUs · 16 × 512 tokens": (
        {},
        {"train": {"fsdp": True}, "parallel": {"gpus": 8}},
    ),
    "BertForMaskedLM · fp32 · AdamW (fused) · SDPA · compiled · TRL's SFTTrainer · 16 × 512 tokens": (
        {"compiled": True, "loop": "sft"},
        {},
    ),
    "ResNet · fp32 (products in TF32) · SGD · the script's own loop · 16 × 1 image of 224 × 224": (
        {
            "models": ("ResNet",),
            "loop": "script",
            "optimizer": "torch.optim.sgd.SGD",
            "attention": None,
            "tf32": True,
            "inputs": {"pixel_values": (3, 224, 224)},
        },
        {},
    ),
    "BertForMaskedLM · fp32 · SDPA · generation · 16 × 512 tokens + 128 new, 4 beams": (
        {"mode": "generation", "optimizer": None, "new_tokens": 128, "beams": 4},
        {},
    ),
    "BertForMaskedLM · fp32 · SDPA · inference · 16 × 512 tokens": ({"mode": "inference", "optimizer": None}, {}),
    "BertForMaskedLM · 12.5 % of the parameters trained · fp32 · AdamW (fused) · SDPA · Trainer · "
    "16 × 10 to 200 tokens": ({"trained_share": 0.125, "lengths": (10, 200)}, {}),
    "BertForMaskedLM · fp32 · AdamW of transformers 4 · eager attention · gradients kept between steps · Trainer · "
    "16 × 512 tokens · libraries of 2022, PyTorch 1.10": (
        {
            "optimizer": "trainatomy.training.adamw_hf.AdamW",
            "attention": "eager",
            "keeps_gradients": True,
            "era": "2022",
            "torch": "1.10",
        },
        {},
    ),
    "BertForMaskedLM · fp32 · AdamW (fused) · SDPA · Trainer · 16 × 256 → 64 tokens": (
        {"inputs": {"input_ids": (256,), "labels": (64,)}},
        {},
    ),
    "Net · fp32 · AdamW (fused) · PyTorch loop · 16 × 1,024": (
        {"models": ("Net",), "attention": None, "loop": "pytorch", "inputs": {"x": (1024,), "y": ()}},
        {},
    ),
}


@pytest.mark.parametrize(("line", "changes"), KINDS.items(), ids=range(len(KINDS)))
def test_every_kind_of_training_is_named(
    prediction: Prediction, line: str, changes: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    subject, workload = changes
    assert subject_line(replace(prediction, subject=replace(BERT, **subject), workload=workload)) == line


def test_optimizers_have_the_names_that_people_write() -> None:
    expected = {
        "adamw_torch": "AdamW (foreach)",
        "galore_adamw_8bit_layerwise": "8-bit layerwise AdamW (GaLore)",
        "schedule_free_radam": "schedule-free RAdam",
        "rmsprop_bnb_32bit": "32-bit RMSprop (bitsandbytes)",
        "my_package.Muon": "Muon",
        "AdamW + Muon": "AdamW + Muon",
        "train.py:make": "make",
    }
    assert {name: optimizer_name(name) for name in expected} == expected
    assert all(optimizer_name(name) != name for name in arguments().optimizers)


def test_the_line_stands_below_the_verdict_with_what_was_decided_for_the_user(prediction: Prediction) -> None:
    shown = replace(prediction, subject=BERT, leading_notes=("one image of 224 × 224 for each sample",))
    lines = render(prediction_page(shown), 120).splitlines()
    assert lines[1:3] == [subject_line(shown), "• one image of 224 × 224 for each sample"]
    assert list(page_of(shown).subject) == [subject_line(shown), "one image of 224 × 224 for each sample"]
    assert to_json(shown)["subject"]["line"] == subject_line(shown)
    assert to_json(shown)["leading_notes"] == ["one image of 224 × 224 for each sample"]


def test_a_prediction_of_an_earlier_version_has_no_line(prediction: Prediction) -> None:
    old = replace(prediction, subject=None, leading_notes=())
    assert subject_line(old) == "" and to_json(old)["subject"] is None
    assert render(prediction_page(old), 120).splitlines()[1] == ""


def test_pages_of_several_trainings_say_what_all_have_in_common(prediction: Prediction, fit: Fit) -> None:
    rows = [replace(prediction, subject=replace(BERT, batch_size=size)) for size in (16, 32)]
    shared = "BertForMaskedLM · fp32 · AdamW (fused) · SDPA · Trainer"
    assert shared_subject(rows) == shared and shared_subject([]) == ""
    comparison = Comparison(tuple(ComparisonRow(each.name, each.workload, each) for each in rows))
    assert render(comparison_page(comparison), 120).splitlines()[1] == shared
    assert to_json(comparison)["subject"] == shared
    candidates = tuple(
        replace(each, prediction=replace(each.prediction, subject=replace(BERT, batch_size=number)))
        for number, each in enumerate(fit.candidates)
    )
    searched = replace(fit, candidates=candidates, too_large=())
    assert render(fit_page(searched), 120).splitlines()[1] == shared
    assert to_json(searched)["subject"] == shared
