"""Scripts with TRL's trainers on several GPUs agree to the byte with the workloads that say the same."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from script_types import RunScript

import trainatomy
from trainatomy.results.memory import Memory
from trainatomy.workload.overrides import merge

pytest.importorskip("trl")
pytest.importorskip("datasets")

CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip
SCRIPT = """
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import {kind}Config, {kind}Trainer

known = {{"<pad>": 0, "<eos>": 1, **{{f"w{{n}}": n for n in range(2, 900)}}}}
words = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left", truncation_side="left"
)
arguments = {kind}Config("out", per_device_train_batch_size=2, max_steps=3, report_to="none", **{settings})
config = LlamaConfig(**{config}, num_labels=1, pad_token_id=0)


def make():
    kind = LlamaForSequenceClassification if "{kind}" == "Reward" else LlamaForCausalLM
    return kind.from_pretrained("nobody/tiny-llama", config=config, dtype=torch.bfloat16)


def text(count, first=2):
    return " ".join(f"w{{first + n}}" for n in range(count))


ids = [list(range(2, 34))] * 64
rows = {{
    "SFT": {{"input_ids": ids}},
    "DPO": {{"prompt": [text(8)] * 64, "chosen": [" " + text(23)] * 64, "rejected": [" " + text(23, 100)] * 64}},
    "KTO": {{"prompt": [text(8)] * 64, "completion": [" " + text(23)] * 64, "label": [True, False] * 32}},
    "Reward": {{"chosen_ids": ids, "rejected_ids": ids}},
}}["{kind}"]
model = make()
more = {{"ref_model": make()}} if "{kind}" in ("DPO", "KTO") else {{}}
data = Dataset.from_dict(rows)
{kind}Trainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, **more).train()
"""


def zero(stage: int) -> dict[str, Any]:
    optimization = {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
    return {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": optimization}


PLANS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2}},
    "fsdp1": {"fsdp": True, "fsdp_config": {"version": 1}},
}
LOOPS = ("SFT", "DPO", "KTO", "Reward")


def text_of(kind: str, settings: dict[str, Any]) -> str:
    return SCRIPT.format(kind=kind, settings=settings, config=CONFIG)


def workload_of(kind: str, settings: dict[str, Any]) -> trainatomy.Workload:
    name = "LlamaForSequenceClassification" if kind == "Reward" else "LlamaForCausalLM"
    data = {"sequence_length": 32, **({"prompt_length": 8} if kind in ("DPO", "KTO") else {})}
    return trainatomy.Workload.from_mapping(
        {
            "model": {"class": name, "config": {**CONFIG, "num_labels": 1, "pad_token_id": 0}, "dtype": "bfloat16"},
            "loop": kind.lower(),
            "data": data,
            "train": {"per_device_train_batch_size": 2, **settings},
            "parallel": {"gpus": 2},
            "gpu": "h100-sxm",
        }
    )


def memory_of(kind: str, settings: dict[str, Any]) -> Memory:
    return trainatomy.predict(workload_of(kind, settings)).memory


@pytest.mark.parametrize(
    ("kind", "plan"), [(loop, plan) for loop in LOOPS for plan in PLANS if plan == "ddp" or loop in ("SFT", "DPO")]
)
def test_a_script_on_two_gpus_is_its_loop(run_script: RunScript, kind: str, plan: str) -> None:
    outcome = run_script(text_of(kind, PLANS[plan]), gpus=2)
    assert outcome.prediction is not None, outcome.message
    found, expected = outcome.prediction.memory, memory_of(kind, PLANS[plan])
    assert found.peak_allocated_bytes == expected.peak_allocated_bytes
    if plan != "fsdp1":  # its blocks wait for other streams, and addresses decide between blocks of one size
        assert found.peak_reserved_bytes == expected.peak_reserved_bytes


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("kind", "stage"), [("SFT", 2), ("DPO", 1)])
def test_a_script_with_deepspeed_is_its_loop(tmp_path: Path, kind: str, stage: int) -> None:
    """The script has a process of its own, because DeepSpeed keeps its groups in variables of its modules."""
    settings = {"deepspeed": zero(stage)}
    (tmp_path / "train.py").write_text(text_of(kind, settings))
    command = [sys.executable, "-m", "trainatomy", "run", "--gpus", "2", "--gpu", "h100-sxm", "--json", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found, expected = json.loads(ran.stdout)["memory"], memory_of(kind, settings)
    assert found["peak_allocated_bytes"] == expected.peak_allocated_bytes
    assert found["peak_reserved_bytes"] == expected.peak_reserved_bytes


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_script_that_accelerate_starts_with_deepspeed_is_its_loop(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text_of("SFT", {}))
    launch = "accelerate launch --use_deepspeed --zero_stage 2 --mixed_precision bf16 --num_processes 2 train.py"
    command = [sys.executable, "-m", "trainatomy", "run", "--gpu", "h100-sxm", "--json", *launch.split()]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(ran.stdout)["memory"]
    expected = trainatomy.predict(merge(workload_of("SFT", {}), {"launch": launch})).memory
    assert found["peak_allocated_bytes"] == expected.peak_allocated_bytes
