"""A script with sentence-transformers' trainer and the workload that says the same agree to the byte."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import parse as parse_version
from script_types import RunScript
from transformers.integrations.peft import MIN_PEFT_VERSION

import trainatomy

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

SCRIPT = """
from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

transformer = Transformer("bert", max_seq_length=32)
model = SentenceTransformer(modules=[transformer, Pooling(64, "cls"), Normalize()])
if {lora}:
    model.add_adapter(LoraConfig(task_type="FEATURE_EXTRACTION", r=4))
loss = losses.{loss}(model, **{arguments})
data = Dataset.from_dict(dict.fromkeys(("anchor", "positive", "negative"), [" ".join("a" * 32)] * 64))
arguments = SentenceTransformerTrainingArguments(
    "out", per_device_train_batch_size=8, max_steps=3, report_to="none", save_strategy="no", **{train}
)
SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
"""
CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip


def save_bert() -> None:
    """Save a checkpoint with a tokenizer of words, which the script loads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", model_input_names=names).save_pretrained("bert")
    BertModel(BertConfig(**CONFIG)).save_pretrained("bert")


ADDS_ADAPTERS = pytest.mark.skipif(
    parse_version(MIN_PEFT_VERSION) > parse_version(version("peft")),
    reason=f"this transformers adds adapters with peft {MIN_PEFT_VERSION}",
)


@pytest.mark.parametrize(
    ("loss", "arguments", "lora", "train"),
    [
        ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 2}, False, {"gradient_checkpointing": True}),
        pytest.param("MultipleNegativesRankingLoss", {}, True, {"bf16": True}, marks=ADDS_ADAPTERS),
    ],
    ids=["cached", "adapters"],
)
def test_a_script_with_the_trainer_is_its_loop(
    run_script: RunScript, loss: str, arguments: dict[str, Any], lora: bool, train: dict[str, Any]
) -> None:
    save_bert()
    found = run_script(SCRIPT.format(loss=loss, arguments=arguments, lora=lora, train=train)).prediction
    workload = trainatomy.Workload.from_mapping(
        {
            "model": {
                "class": "BertModel",
                "config": CONFIG,
                "lora": {"r": 4, "task_type": "FEATURE_EXTRACTION"} if lora else None,
            },
            "loop": "sentence_transformers",
            "sentence_transformers": {
                "loss": loss, "negatives": 1, "pooling": "cls", "normalize": True, **arguments
            },
            "data": {"sequence_length": 32},
            "train": {"per_device_train_batch_size": 8, **train},
            "gpu": "h100-sxm",
        }
    )  # fmt: skip
    memory = trainatomy.predict(workload).memory
    assert found is not None
    assert found.memory.peak_allocated_bytes == memory.peak_allocated_bytes
    assert found.memory.peak_reserved_bytes == memory.peak_reserved_bytes
    assert found.memory.components.optimizer_states == memory.components.optimizer_states
