import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
import tempfile


class Reviews(Dataset):
    def __init__(self, n, seed):
        r = np.random.default_rng(seed)
        self.rows = [r.integers(1000, 30000, r.integers(20, 128)).tolist() for _ in range(n)]
        self.labels = r.integers(0, 2, n).tolist()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.labels[i]}


def collate(batch):
    n = max(len(b["input_ids"]) for b in batch)
    ids = torch.zeros(len(batch), n, dtype=torch.long)
    mask = torch.zeros(len(batch), n, dtype=torch.long)
    for i, b in enumerate(batch):
        ids[i, : len(b["input_ids"])] = torch.tensor(b["input_ids"])
        mask[i, : len(b["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([b["labels"] for b in batch])}


class FocalTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        out = model(**inputs)
        ce = nn.functional.cross_entropy(
            out.logits, labels, weight=torch.tensor([1.0, 2.5], device=out.logits.device), reduction="none"
        )
        loss = ((1 - torch.exp(-ce)) ** 2 * ce).mean()
        return (loss, out) if return_outputs else loss


class Memory(TrainerCallback):
    def on_step_end(self, args, state, control, **kw):
        print("GPU", torch.cuda.max_memory_allocated() // 2**20, "MiB")


def metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


model = DistilBertForSequenceClassification(DistilBertConfig(num_labels=2))
for p in model.distilbert.embeddings.parameters():
    p.requires_grad = False
args = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    per_device_eval_batch_size=32,
    learning_rate=2e-5,
    max_steps=10,
    eval_strategy="steps",
    eval_steps=1,
    bf16=True,
    logging_steps=1,
    weight_decay=0.01,
    report_to="none",
    save_strategy="no",
)
FocalTrainer(
    model=model,
    args=args,
    train_dataset=Reviews(400, 0),
    eval_dataset=Reviews(64, 1),
    data_collator=collate,
    compute_metrics=metrics,
    callbacks=[Memory()],
).train()
