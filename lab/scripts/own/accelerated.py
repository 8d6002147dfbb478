"""BERT with accelerate: fp16, two micro-batches of different lengths for each step."""

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForSequenceClassification

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
lengths = (128, 96, 160, 64, 192, 128, 256, 64)
batches = [
    {"input_ids": torch.randint(0, 30000, (32, n)), "labels": torch.zeros(32, dtype=torch.long)} for n in lengths
]
loader = torch.utils.data.DataLoader(batches, batch_size=None)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
