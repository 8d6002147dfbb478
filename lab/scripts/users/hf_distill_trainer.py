"""Distil a BERT into a smaller one with a Trainer of our own: hidden states, attention and soft labels."""

from dataclasses import dataclass, field

import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Extra(TrainingArguments):
    output_dir: str = "distilled"
    temperature: float = field(default=2.0)
    alpha_hidden: float = field(default=1.0)


class Distil(Trainer):
    def __init__(self, *args, teacher=None, **kw):
        super().__init__(*args, **kw)
        self.teacher = self.accelerator.prepare_model(teacher, evaluation_mode=True)
        self.map = nn.Linear(self.model.config.hidden_size, teacher.config.hidden_size).to(self.args.device)

    def create_optimizer(self, *args, **kw):
        made = super().create_optimizer(*args, **kw)
        made.add_param_group({"params": list(self.map.parameters()), "lr": 1e-3})
        return made

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            ref = self.teacher(**{k: v for k, v in inputs.items() if k != "labels"}, output_hidden_states=True)
        t = self.args.temperature
        picked = inputs["labels"] != -100
        soft = F.kl_div(F.log_softmax(out.logits[picked] / t, -1), F.softmax(ref.logits[picked] / t, -1), reduction="batchmean") * t * t
        pairs = zip(out.hidden_states[1:], ref.hidden_states[2::2])
        hidden = sum(F.mse_loss(self.map(a), b) for a, b in pairs)
        loss = 0.5 * out.loss + 0.5 * soft + self.args.alpha_hidden * hidden
        return (loss, out) if return_outputs else loss


def collate(rows):
    ids = torch.tensor(np.stack([r["ids"] for r in rows]))
    chosen = torch.zeros(ids.shape, dtype=torch.bool)
    chosen[:, ::7] = True
    return {"input_ids": ids.masked_fill(chosen, 103), "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(~chosen, -100)}


if __name__ == "__main__":
    (args,) = HfArgumentParser(Extra).parse_args_into_dataclasses(
        ["--per_device_train_batch_size", "16", "--max_steps", "4", "--bf16", "true", "--report_to", "none", "--save_strategy", "no",
         "--remove_unused_columns", "false", "--logging_steps", "1", "--optim", "adamw_torch"]
    )  # fmt: skip
    rng = np.random.default_rng(0)
    rows = [{"ids": rng.integers(1000, 20000, 256)} for _ in range(128)]
    small = dict(vocab_size=20000, num_attention_heads=8)
    student = BertForMaskedLM(BertConfig(hidden_size=384, num_hidden_layers=4, intermediate_size=1536, **small))
    teacher = BertForMaskedLM(BertConfig(hidden_size=768, num_hidden_layers=8, intermediate_size=3072, **small))
    Distil(student, args, train_dataset=rows, data_collator=collate, teacher=teacher).train()
