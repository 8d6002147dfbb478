"""Translation with the Seq2SeqTrainer: predict_with_generate, tokens counted, evaluation each second step."""

import tempfile
import numpy as np
import torch
from transformers import MT5Config, MT5ForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments


class Pairs(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        r = np.random.default_rng(seed)
        self.rows = [(r.integers(2, 9000, r.integers(20, 90)), r.integers(2, 9000, r.integers(16, 64))) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i][0], "labels": self.rows[i][1]}


def collate(rows):
    fill = lambda key, value: torch.nn.utils.rnn.pad_sequence([torch.from_numpy(r[key]) for r in rows], batch_first=True, padding_value=value)
    ids = fill("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": fill("labels", -100)}


def metrics(p):
    guess = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
    return {"length": float((np.asarray(guess) > 0).sum(1).mean())}


config = MT5Config(vocab_size=9000, d_model=384, d_kv=64, d_ff=1024, num_layers=5, num_heads=6, decoder_start_token_id=0)
model = MT5ForConditionalGeneration(config)
model.generation_config.min_new_tokens = model.generation_config.max_new_tokens = 24
args = Seq2SeqTrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=12, per_device_eval_batch_size=16, max_steps=6, bf16=True,
                                eval_strategy="steps", eval_steps=2, predict_with_generate=True, generation_num_beams=3,
                                optim="adafactor", learning_rate=1e-3, report_to="none", save_strategy="no", logging_steps=2, seed=3,
                                include_num_input_tokens_seen="all")  # fmt: skip
Seq2SeqTrainer(model=model, args=args, train_dataset=Pairs(200, 0), eval_dataset=Pairs(32, 1), data_collator=collate, compute_metrics=metrics).train()
