"""A transformer in a plain loop: bf16 autocast, AdamW, clipping, evaluation every other step."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--layers", type=int, default=8)
arguments = parser.parse_args()

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
body = nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(32000, 768), body, nn.Linear(768, 32000)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
tokens = torch.randint(0, 32000, (256, arguments.length + 1))
loader = torch.utils.data.DataLoader(tokens, batch_size=arguments.batch_size, shuffle=True, num_workers=2)
for step, batch in enumerate(loader):
    batch = batch.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 32000), batch[:, 1:].reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 0:
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            model(batch[:4, :-1])
        model.train()
    print(step, loss.item())
