"""Two towers: EmbeddingBag with sparse gradients, SparseAdam beside AdamW, sampled softmax with corrections."""

import torch
from torch import nn
import torch.nn.functional as F

ITEMS, USERS, D, B = 2_000_000, 500_000, 64, 8192


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, D, mode="mean", sparse=True)
        self.user = nn.Embedding(USERS, D, sparse=True)
        self.query = nn.Sequential(nn.Linear(2 * D, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, D))

    def forward(self, users, history, offsets, target):
        q = self.query(torch.cat([self.user(users), self.items(history, offsets)], -1))
        return q, self.items(target[:, None])


model = Towers().cuda()
sparse = torch.optim.SparseAdam([model.items.weight, model.user.weight], lr=1e-3)
dense = torch.optim.AdamW(model.query.parameters(), lr=1e-3)
counts = torch.ones(ITEMS, device="cuda")
for step in range(5):
    lengths = torch.randint(1, 40, (B,))
    history = torch.randint(ITEMS, (int(lengths.sum()),)).cuda()
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]]).cuda()
    users, target = torch.randint(USERS, (B,)).cuda(), torch.randint(ITEMS, (B,)).cuda()
    q, t = model(users, history, offsets, target)
    counts.index_add_(0, target, torch.ones(B, device="cuda"))
    logits = q @ t.t() / 0.05 - (counts[target] / counts.sum()).log()
    logits = logits.masked_fill((target[:, None] == target[None]).fill_diagonal_(False), -1e9)
    loss = F.cross_entropy(logits, torch.arange(B, device="cuda"))
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    print(step, loss.item())
