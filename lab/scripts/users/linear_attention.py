"""Gated linear attention in chunks, short convolutions, a hybrid with local windows, Lion by hand, activation checkpoints."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import torch.nn.functional as F

D, H, T, B, C = 512, 4, 1024, 8, 64


class GLA(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.g, self.o = nn.Linear(D, 3 * D), nn.Linear(D, H), nn.Linear(D, D)
        self.conv = nn.Conv1d(3 * D, 3 * D, 4, groups=3 * D, padding=3)
        self.norm = nn.GroupNorm(H, D)

    def forward(self, x):
        b, t, _ = x.shape
        z = F.silu(self.conv(self.qkv(x).transpose(1, 2))[..., :t]).transpose(1, 2)
        q, k, v = (s.view(b, t // C, C, H, D // H).permute(0, 3, 1, 2, 4).float() for s in z.chunk(3, -1))
        decay = F.logsigmoid(self.g(x)).view(b, t // C, C, H).permute(0, 3, 1, 2).float().cumsum(-1)
        inner = torch.einsum("bhncd,bhnmd->bhncm", q, k) * (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        out = inner @ v
        state, states = torch.zeros(b, H, D // H, D // H, device=x.device), []
        kv = torch.einsum("bhncd,bhnce->bhnde", k * (decay[..., -1:] - decay).exp()[..., None], v)
        for n in range(t // C):
            states.append(state)
            state = state * decay[:, :, n, -1].exp()[..., None, None] + kv[:, :, n]
        out = out + torch.einsum("bhncd,bhnde->bhnce", q * decay.exp()[..., None], torch.stack(states, 2))
        out = out.permute(0, 2, 3, 1, 4).reshape(b * t, D).to(x.dtype)
        return self.o(self.norm(out).view(b, t, D))


class Window(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (s.view(b, t // C, C, H, D // H).transpose(2, 3).flatten(0, 1) for s in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.view(b, t // C, H, C, D // H).transpose(2, 3).reshape(b, t, D))


class Block(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.m, self.a, self.b = mixer, nn.LayerNorm(D), nn.LayerNorm(D)
        self.f = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        x = x + self.m(self.a(x))
        return x + self.f(self.b(x))


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), wd=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, wd=wd))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in (p for p in g["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - g["lr"] * g["wd"])
                p.add_((m * g["betas"][0] + p.grad * (1 - g["betas"][0])).sign_(), alpha=-g["lr"])
                m.mul_(g["betas"][1]).add_(p.grad, alpha=1 - g["betas"][1])


embed, head = nn.Embedding(16000, D).cuda(), nn.Linear(D, 16000).cuda()
blocks = nn.ModuleList(Block(GLA() if n % 3 else Window()) for n in range(6)).cuda()
opt = Lion([*embed.parameters(), *blocks.parameters(), *head.parameters()])
for step in range(4):
    ids = torch.randint(16000, (B, T + 1), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        x = embed(ids[:, :-1])
        for n, block in enumerate(blocks):
            x = checkpoint(block, x, use_reentrant=n % 2 == 0)
        loss = F.cross_entropy(head(x).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
