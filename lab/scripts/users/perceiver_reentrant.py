"""Perceiver: latents attend to bytes, reentrant checkpoints, stochastic depth by Python's random, tied output, Adafactor."""

import random, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import torch.nn.functional as F

random.seed(11)
torch.manual_seed(11)


class Attend(nn.Module):
    def __init__(self, d, heads=8):
        super().__init__()
        self.h, self.nq, self.nk = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, y):
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = self.kv(self.nk(y)).chunk(2, -1)
        x = x + self.o(F.scaled_dot_product_attention(split(self.q(self.nq(x))), split(k), split(v)).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Perceiver(nn.Module):
    def __init__(self, d=512, latents=192, depth=10):
        super().__init__()
        self.embed, self.pos, self.latents = nn.Embedding(262, d), nn.Embedding(2048, d), nn.Parameter(torch.randn(latents, d) * 0.02)
        self.read, self.write = Attend(d), Attend(d)
        self.layers = nn.ModuleList(Attend(d) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight[: ids.shape[1]]
        z = self.read(self.latents.expand(len(ids), -1, -1), x)
        for n, layer in enumerate(self.layers):
            if self.training and random.random() < 0.2 * n / len(self.layers):
                continue
            z = checkpoint(layer, z, z, use_reentrant=True) if n % 2 else layer(z, z)
        return self.write(self.pos.weight[: ids.shape[1]].expand(len(ids), -1, -1), z) @ self.embed.weight.t()


model = Perceiver().cuda()
opt = torch.optim.Adafactor(model.parameters(), lr=1e-2)
for step in range(5):
    ids = torch.randint(262, (12, 1024), device="cuda")
    masked = torch.where(torch.rand(ids.shape, device="cuda") < 0.15, 261, ids)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(masked).flatten(0, 1), ids.flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
