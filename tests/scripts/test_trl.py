"""A script with TRL's trainer and the workload that says the same agree to the byte."""

from __future__ import annotations

import pytest
from script_types import RunScript

import trainatomy

pytest.importorskip("trl")
pytest.importorskip("datasets")

SCRIPT = """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<eos>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
)
arguments = SFTConfig("out", per_device_train_batch_size=2, max_steps=3, report_to="none")
data = Dataset.from_dict({"input_ids": [[2] * 32] * 64})
SFTTrainer(LlamaForCausalLM(config), args=arguments, train_dataset=data, processing_class=tokenizer).train()
"""
CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip


def test_a_script_with_trls_trainer_is_its_loop(run_script: RunScript) -> None:
    found = run_script(SCRIPT).prediction
    workload = trainatomy.Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": CONFIG},
            "loop": "sft",
            "data": {"sequence_length": 32},
            "train": {"per_device_train_batch_size": 2},
            "gpu": "h100-sxm",
        }
    )
    memory = trainatomy.predict(workload).memory
    assert found is not None
    assert found.memory.peak_allocated_bytes == memory.peak_allocated_bytes
    assert found.memory.peak_reserved_bytes == memory.peak_reserved_bytes
    assert found.memory.components.optimizer_states == memory.components.optimizer_states
