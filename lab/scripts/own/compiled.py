"""A small transformer that `accelerate launch --dynamo_backend inductor` compiles: bf16, a constant length."""

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForSequenceClassification

accelerator = Accelerator(mixed_precision="bf16")
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", num_hidden_layers=3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
batches = [{"input_ids": torch.randint(0, 30000, (48, 256)), "labels": torch.zeros(48, dtype=torch.long)}] * 16
loader = torch.utils.data.DataLoader(batches, batch_size=None)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
