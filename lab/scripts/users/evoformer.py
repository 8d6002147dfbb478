"""Pair and MSA stacks: einsum everywhere, triangle updates, outer products, checkpointed blocks in bfloat16."""

import torch
from torch import nn, einsum
from torch.utils.checkpoint import checkpoint
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, d, heads, bias=None):
        super().__init__()
        self.h, self.norm, self.qkv = heads, nn.LayerNorm(d), nn.Linear(d, 3 * d, bias=False)
        self.gate, self.out = nn.Linear(d, d), nn.Linear(d, d)
        self.bias = None if bias is None else nn.Linear(bias, heads, bias=False)

    def forward(self, x, pair=None):
        x = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.h, -1)) for t in self.qkv(x).chunk(3, -1))
        a = einsum("bsihd,bsjhd->bshij", q * q.shape[-1] ** -0.5, k)
        if pair is not None:
            a = a + self.bias(pair).permute(0, 3, 1, 2)[:, None]
        o = einsum("bshij,bsjhd->bsihd", a.softmax(-1), v).flatten(-2)
        return self.out(torch.sigmoid(self.gate(x)) * o)


class Triangle(nn.Module):
    def __init__(self, d, equation):
        super().__init__()
        self.eq, self.norm, self.ab, self.g = equation, nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(d, d)
        self.norm2, self.out = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, z):
        z = self.norm(z)
        a, b = F.glu(self.ab(z), -1).chunk(2, -1)
        return torch.sigmoid(self.g(z)) * self.out(self.norm2(einsum(self.eq, a, b)))


class Block(nn.Module):
    def __init__(self, dm, dz, h=4, c=24):
        super().__init__()
        self.row, self.col = Attention(dm, h, dz), Attention(dm, h)
        self.tm = nn.Sequential(nn.LayerNorm(dm), nn.Linear(dm, 4 * dm), nn.ReLU(), nn.Linear(4 * dm, dm))
        self.on, self.oa, self.ob, self.oo = nn.LayerNorm(dm), nn.Linear(dm, c), nn.Linear(dm, c), nn.Linear(c * c, dz)
        self.t1, self.t2 = Triangle(dz, "bikc,bjkc->bijc"), Triangle(dz, "bkic,bkjc->bijc")
        self.s, self.e = Attention(dz, h, dz), Attention(dz, h, dz)
        self.tz = nn.Sequential(nn.LayerNorm(dz), nn.Linear(dz, 4 * dz), nn.ReLU(), nn.Linear(4 * dz, dz))

    def forward(self, m, z):
        m = m + F.dropout(self.row(m, z), 0.15, self.training)
        m = m + self.col(m.transpose(1, 2)).transpose(1, 2)
        m = m + self.tm(m)
        n = self.on(m)
        z = z + self.oo(einsum("bsic,bsjd->bijcd", self.oa(n), self.ob(n)).flatten(-2) / m.shape[1])
        z = z + self.t1(z)
        z = z + self.t2(z)
        z = z + self.s(z, z)
        z = z + self.e(z.transpose(1, 2), z.transpose(1, 2)).transpose(1, 2)
        return m, z + self.tz(z)


class Model(nn.Module):
    def __init__(self, dm=128, dz=64, blocks=4):
        super().__init__()
        self.em, self.el, self.er = nn.Embedding(23, dm), nn.Embedding(23, dz), nn.Embedding(23, dz)
        self.blocks = nn.ModuleList(Block(dm, dz) for _ in range(blocks))
        self.mask, self.dist = nn.Linear(dm, 23), nn.Linear(dz, 37)

    def forward(self, msa):
        m, z = self.em(msa), self.el(msa[:, 0])[:, :, None] + self.er(msa[:, 0])[:, None]
        for block in self.blocks:
            m, z = checkpoint(block, m, z, use_reentrant=False)
        return self.mask(m), self.dist(z + z.transpose(1, 2))


model = Model().cuda()
opt = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.999), eps=1e-6)
for step in range(4):
    msa, bins = torch.randint(23, (1, 32, 128), device="cuda"), torch.randint(37, (1, 128, 128), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        a, b = model(msa)
        loss = F.cross_entropy(a.float().flatten(0, 2), msa.flatten()) + F.cross_entropy(b.permute(0, 3, 1, 2).float(), bins)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
