"""Decoder in plain PyTorch: rotary positions, grouped heads, einsum attention, z-loss, tied head, clipping by value."""

import math, torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
V, D, H, KV, L, T, B = 32000, 768, 12, 4, 6, 512, 8


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q, self.kv, self.o = nn.Linear(D, D, False), nn.Linear(D, 2 * KV * D // H, False), nn.Linear(D, D, False)
        self.gate, self.up, self.down = nn.Linear(D, 2048, False), nn.Linear(D, 2048, False), nn.Linear(2048, D, False)

    def forward(self, x, cos, sin, mask):
        h = self.n1(x)
        q = rearranged(self.q(h), H)
        k, v = (rearranged(t, KV).repeat_interleave(H // KV, 1) for t in self.kv(h).chunk(2, -1))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(D // H)
        scores = 50 * torch.tanh(scores / 50)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.o(torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).flatten(2))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rearranged(t, heads):
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.RMSNorm(D)
        inv = 1 / 10000 ** (torch.arange(0, D // H, 2) / (D // H))
        angles = torch.outer(torch.arange(T), inv).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, ids):
        x = self.embed(ids) * D**0.5
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.mask)
        return self.norm(x) @ self.embed.weight.t()


model = Model().cuda().to(torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), fused=True)
for step in range(5):
    ids = torch.randint(0, V, (B, T + 1)).cuda(non_blocking=True)
    logits = model(ids[:, :-1]).float()
    z = torch.logsumexp(logits, -1)
    picked = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = (z - picked).mean() + 1e-4 * z.square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
