"""Masked autoencoder: random masking by argsort and gather, a light decoder, a loss on patches, accumulation, LAMB."""

import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), nn.MultiheadAttention(d, h, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.g1, self.g2 = nn.Parameter(1e-4 * torch.ones(d)), nn.Parameter(1e-4 * torch.ones(d))

    def forward(self, x):
        y = self.n1(x)
        x = x + self.g1 * self.attn(y, y, y, need_weights=False)[0]
        return x + self.g2 * self.mlp(self.n2(x))


class MAE(nn.Module):
    def __init__(self, d=512, depth=8, dd=256, patch=16, size=224):
        super().__init__()
        self.p, n = patch, (size // patch) ** 2
        self.proj, self.pos, self.dpos = nn.Linear(3 * patch**2, d), nn.Parameter(torch.randn(1, n, d) * 0.02), nn.Parameter(torch.randn(1, n, dd) * 0.02)
        self.enc, self.norm = nn.ModuleList(Block(d, 8) for _ in range(depth)), nn.LayerNorm(d)
        self.de, self.mask, self.dec = nn.Linear(d, dd), nn.Parameter(torch.zeros(1, 1, dd)), nn.ModuleList(Block(dd, 8) for _ in range(2))
        self.dn, self.out = nn.LayerNorm(dd), nn.Linear(dd, 3 * patch**2)

    def forward(self, images, ratio=0.75):
        b, p = len(images), self.p
        patches = images.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).reshape(b, -1, 3 * p * p)
        x = self.proj(patches) + self.pos
        n, keep = x.shape[1], int(x.shape[1] * (1 - ratio))
        shuffle = torch.rand(b, n, device=x.device).argsort(1)
        restore = shuffle.argsort(1)
        x = x.gather(1, shuffle[:, :keep, None].expand(-1, -1, x.shape[-1]))
        for block in self.enc:
            x = block(x)
        x = self.de(self.norm(x))
        x = torch.cat([x, self.mask.expand(b, n - keep, -1)], 1)
        x = x.gather(1, restore[..., None].expand(-1, -1, x.shape[-1])) + self.dpos
        for block in self.dec:
            x = block(x)
        target = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
        loss = (self.out(self.dn(x)) - target).square().mean(-1)
        masked = torch.ones(b, n, device=x.device)
        masked[:, :keep] = 0
        masked = masked.gather(1, restore)
        return (loss * masked).sum() / masked.sum()


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, wd=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, wd=wd))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if len(s) == 0:
                    s["m"], s["v"] = torch.zeros_like(p), torch.zeros_like(p)
                s["m"].mul_(g["betas"][0]).add_(p.grad, alpha=1 - g["betas"][0])
                s["v"].mul_(g["betas"][1]).addcmul_(p.grad, p.grad, value=1 - g["betas"][1])
                update = s["m"] / (s["v"].sqrt() + g["eps"]) + g["wd"] * p
                wn, un = p.norm(), update.norm()
                ratio = torch.where(wn > 0, torch.where(un > 0, wn / un, 1.0), 1.0)
                p.sub_(g["lr"] * ratio * update)


model = MAE().cuda()
opt = Lamb(model.parameters())
for step in range(4):
    for micro in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(torch.rand(32, 3, 224, 224, device="cuda"))
        (loss / 3).backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
