"""Summarisation with Seq2SeqTrainer: T5 from a configuration, a tokenizer built here, generation in evaluation."""

import dataclasses
import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments,
                          T5Config, T5ForConditionalGeneration, set_seed)  # fmt: skip


@dataclasses.dataclass
class Sizes:
    source: int = 256
    target: int = 48
    vocab: int = 16000


s = Sizes()
set_seed(11)
vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, s.vocab)}}
raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tok = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512)
rng = np.random.default_rng(0)


def sentence(n):
    return " ".join(f"w{i}" for i in rng.integers(3, s.vocab, n))


def rows(n):
    return Dataset.from_dict({"document": [sentence(300) for _ in range(n)], "summary": [sentence(60) for _ in range(n)]})


def tokenize(batch):
    out = tok(batch["document"], max_length=s.source, truncation=True)
    out["labels"] = tok(text_target=batch["summary"], max_length=s.target, truncation=True)["input_ids"]
    return out


train = rows(200).map(tokenize, batched=True, remove_columns=["document", "summary"])
valid = rows(24).map(tokenize, batched=True, remove_columns=["document", "summary"])
model = T5ForConditionalGeneration(T5Config(vocab_size=s.vocab, d_model=512, d_kv=64, d_ff=1536, num_layers=6, num_heads=8,
                                            feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0))  # fmt: skip


def metrics(p):
    preds, labels = p
    preds = np.where(preds != -100, preds, 0)
    return {"gen_len": float(np.mean((preds != 0).sum(-1))), "match": float((preds[:, :10] == labels[:, :10]).mean())}


args = Seq2SeqTrainingArguments(
    "t5_out", per_device_train_batch_size=8, per_device_eval_batch_size=12, gradient_accumulation_steps=2, max_steps=4,
    learning_rate=3e-4, optim="adafactor", bf16=True, predict_with_generate=True, generation_max_length=32,
    generation_num_beams=2, eval_strategy="steps", eval_steps=2, save_strategy="no", logging_steps=1, report_to=[],
    group_by_length=False, label_smoothing_factor=0.1, lr_scheduler_type="constant_with_warmup", warmup_steps=1,
) if not hasattr(Seq2SeqTrainingArguments, "train_sampling_strategy") else Seq2SeqTrainingArguments(
    "t5_out", per_device_train_batch_size=8, per_device_eval_batch_size=12, gradient_accumulation_steps=2, max_steps=4,
    learning_rate=3e-4, optim="adafactor", bf16=True, predict_with_generate=True, generation_max_length=32,
    generation_num_beams=2, eval_strategy="steps", eval_steps=2, save_strategy="no", logging_steps=1, report_to=[],
    label_smoothing_factor=0.1, lr_scheduler_type="constant_with_warmup", warmup_steps=1,
)  # fmt: skip
trainer = Seq2SeqTrainer(model, args, train_dataset=train, eval_dataset=valid, processing_class=tok,
                         data_collator=DataCollatorForSeq2Seq(tok, model, pad_to_multiple_of=8), compute_metrics=metrics)  # fmt: skip
print(trainer.train().metrics)
