"""Trainer with a model of one's own: two heads, custom loss, callbacks, EMA by a callback, evaluation with metrics, groups of rates."""

import numpy as np, torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(BertConfig(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048))
        self.token, self.sentence = nn.Linear(512, 17), nn.Linear(512, 3)
        self.sigmas = nn.Parameter(torch.zeros(2))

    def forward(self, input_ids, attention_mask, tags=None, label=None):
        out = self.bert(input_ids, attention_mask=attention_mask)
        token, sentence = self.token(out.last_hidden_state), self.sentence(out.pooler_output)
        loss = None
        if label is not None:
            parts = torch.stack([nn.functional.cross_entropy(token.flatten(0, 1), tags.flatten(), ignore_index=-100), nn.functional.cross_entropy(sentence, label, label_smoothing=0.1)])
            loss = (parts * torch.exp(-self.sigmas) + self.sigmas).sum()
        return {"loss": loss, "token": token, "sentence": sentence}


class Data(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length = 40 + i * 37 % 80
        return {"input_ids": torch.randint(5, 30000, (length,), generator=g), "tags": torch.randint(17, (length,), generator=g), "label": i % 3}


def collate(rows):
    pad = nn.utils.rnn.pad_sequence
    ids = pad([r["input_ids"] for r in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "tags": pad([r["tags"] for r in rows], batch_first=True, padding_value=-100), "label": torch.tensor([r["label"] for r in rows])}


class EMA(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kw):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def on_step_end(self, args, state, control, model=None, **kw):
        self.average.update_parameters(model)


class Mine(Trainer):
    def create_optimizer(self):
        head = [p for n, p in self.model.named_parameters() if not n.startswith("bert")]
        self.optimizer = torch.optim.AdamW([{"params": self.model.bert.parameters(), "lr": 2e-5}, {"params": head, "lr": 1e-3}], weight_decay=0.01)
        return self.optimizer


def metrics(p):
    token, sentence = p.predictions
    return {"accuracy": float((np.argmax(sentence, -1) == p.label_ids[1]).mean())}


args = TrainingArguments(
    "out", per_device_train_batch_size=24, per_device_eval_batch_size=48, max_steps=6, bf16=True, eval_strategy="steps", eval_steps=3,
    logging_steps=2, save_strategy="no", report_to="none", label_names=["tags", "label"], remove_unused_columns=False, max_grad_norm=0.7, lr_scheduler_type="cosine", warmup_steps=2,
)  # fmt: skip
trainer = Mine(TwoHeads(), args, collate, Data(400), Data(160), compute_metrics=metrics, callbacks=[EMA()])
trainer.train()
