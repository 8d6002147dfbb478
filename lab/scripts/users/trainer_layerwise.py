"""A Trainer of one's own: layer-wise learning rates, R-Drop, an EMA callback, unfreezing, logits reduced before metrics."""

import copy, tempfile
import numpy as np
import torch
import torch.nn.functional as F
from transformers import RobertaConfig, RobertaForMultipleChoice, Trainer, TrainerCallback, TrainingArguments


class Questions(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.g = np.random.default_rng(seed).integers(10, 8000, (n, 4, 96))

    def __len__(self):
        return len(self.g)

    def __getitem__(self, i):
        return {"input_ids": torch.from_numpy(self.g[i]), "labels": int(self.g[i, 0, 0]) % 4}


class RDrop(Trainer):
    def create_optimizer(self, model=None):
        groups, depth = [], self.model.config.num_hidden_layers
        for name, p in self.model.named_parameters():
            layer = int(name.split("layer.")[1].split(".")[0]) + 1 if "encoder.layer" in name else (0 if "embeddings" in name else depth + 1)
            groups.append({"params": [p], "lr": self.args.learning_rate * 0.8 ** (depth + 1 - layer), "weight_decay": 0.01 * (p.ndim > 1)})
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        a, b = model(**inputs), model(**inputs)
        p, q = a.logits.log_softmax(-1), b.logits.log_softmax(-1)
        kl = 0.5 * (F.kl_div(p, q, log_target=True, reduction="batchmean") + F.kl_div(q, p, log_target=True, reduction="batchmean"))
        loss = 0.5 * (a.loss + b.loss) + kl
        return (loss, a) if return_outputs else loss


class Average(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kw):
        self.ema = copy.deepcopy(model).requires_grad_(False)
        for p in model.roberta.embeddings.parameters():
            p.requires_grad = False

    def on_step_end(self, args, state, control, model=None, **kw):
        for a, b in zip(self.ema.parameters(), model.parameters()):
            a.lerp_(b.detach(), 0.05)
        if state.global_step == 1:
            for p in model.parameters():
                p.requires_grad = True


config = RobertaConfig(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048, vocab_size=8000, max_position_embeddings=130, pad_token_id=1)
args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=8, per_device_eval_batch_size=16, max_steps=5, learning_rate=1e-4, fp16=True,
                         eval_strategy="steps", eval_steps=3, report_to="none", save_strategy="no", logging_steps=1, max_grad_norm=0.5, seed=9)  # fmt: skip
RDrop(model=RobertaForMultipleChoice(config), args=args, train_dataset=Questions(120, 0), eval_dataset=Questions(48, 1), callbacks=[Average()],
      preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
      compute_metrics=lambda p: {"accuracy": float((p.predictions == p.label_ids).mean())}).train()  # fmt: skip
