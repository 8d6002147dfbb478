"""Speech recognition with the Trainer: Wav2Vec2 with LayerDrop and SpecAugment, padded sounds, a frozen feature encoder."""

import tempfile
import numpy as np
import torch
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC


class Sounds(torch.utils.data.Dataset):
    def __init__(self, n=64):
        r = np.random.default_rng(2)
        self.lengths, self.texts = r.integers(16000, 56000, n), [r.integers(1, 32, r.integers(8, 40)) for _ in range(n)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return {"input_values": np.random.default_rng(i).standard_normal(self.lengths[i]).astype("float32"), "labels": self.texts[i]}


def collate(rows):
    n, m = max(len(r["input_values"]) for r in rows), max(len(r["labels"]) for r in rows)
    x, mask, y = torch.zeros(len(rows), n), torch.zeros(len(rows), n, dtype=torch.long), torch.full((len(rows), m), -100)
    for i, r in enumerate(rows):
        x[i, : len(r["input_values"])] = torch.from_numpy(r["input_values"])
        mask[i, : len(r["input_values"])] = 1
        y[i, : len(r["labels"])] = torch.from_numpy(r["labels"])
    return {"input_values": x, "attention_mask": mask, "labels": y}


config = Wav2Vec2Config(hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=1536, layerdrop=0.2, feat_extract_norm="layer",
                        do_stable_layer_norm=True, mask_time_prob=0.1, vocab_size=32, ctc_loss_reduction="mean", ctc_zero_infinity=True)  # fmt: skip
model = Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()
args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=6, gradient_accumulation_steps=2, max_steps=4, learning_rate=3e-4, bf16=True,
                         warmup_steps=2, logging_steps=1, report_to="none", save_strategy="no", seed=1234, remove_unused_columns=False)  # fmt: skip
Trainer(model=model, args=args, train_dataset=Sounds(), data_collator=collate).train()
