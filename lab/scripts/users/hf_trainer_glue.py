import numpy as np, torch
from datasets import Dataset, DatasetDict
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    TrainerCallback,
)


class Tok:
    """Stand-in for a tokenizer: pads."""

    padding_side, model_input_names = "right", ["input_ids", "attention_mask"]

    def save_pretrained(self, folder, **kw):
        pass

    def pad(self, features, padding=True, max_length=None, pad_to_multiple_of=None, return_tensors=None):
        n = max(len(f["input_ids"]) for f in features)
        n = -(-n // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
        out = {
            "input_ids": [list(f["input_ids"]) + [0] * (n - len(f["input_ids"])) for f in features],
            "attention_mask": [[1] * len(f["input_ids"]) + [0] * (n - len(f["input_ids"])) for f in features],
            "labels": [f.get("label", f.get("labels")) for f in features],
        }
        return {k: torch.tensor(v) for k, v in out.items()}


class Timer(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kw):
        if state.is_local_process_zero and torch.cuda.is_available():
            print({**(logs or {}), "gpu_mb": torch.cuda.max_memory_allocated() // 2**20})


def rows(n, seed):
    rng = np.random.default_rng(seed)
    return Dataset.from_dict(
        {
            "input_ids": [
                rng.integers(5, 30000, 128 if i % 4 == 0 else int(rng.integers(20, 128))).tolist() for i in range(n)
            ],
            "label": rng.integers(0, 3, n).tolist(),
        }
    )


def compute_metrics(p):
    logits, labels = p
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": float((np.argmax(logits, -1) == labels).mean())}


data = DatasetDict(train=rows(640, 0), validation=rows(200, 1))
model = BertForSequenceClassification(BertConfig(num_labels=3, num_hidden_layers=6))
args = TrainingArguments(
    output_dir="glue", per_device_train_batch_size=32, per_device_eval_batch_size=64, num_train_epochs=1, max_steps=6,
    eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="accuracy",
    logging_steps=1, learning_rate=2e-5, warmup_steps=2, weight_decay=0.01, bf16=True, report_to="none", gradient_checkpointing=False, max_grad_norm=1.0, seed=5,
    optim="adamw_torch_fused", label_smoothing_factor=0.1,
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["validation"],
    data_collator=DataCollatorWithPadding(Tok(), pad_to_multiple_of=8),
    compute_metrics=compute_metrics,
    callbacks=[Timer(), EarlyStoppingCallback(3)],
)
result = trainer.train()
print(result.metrics)
print(trainer.evaluate())
