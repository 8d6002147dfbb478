"""Hash grid encoding of a radiance field: embedding gather at eight corners, occupancy, compositing, sparse updates."""

import torch
from torch import nn
import torch.nn.functional as F


class HashGrid(nn.Module):
    def __init__(self, levels=12, size=2**17, features=2, low=16, high=512):
        super().__init__()
        b = (high / low) ** (1 / (levels - 1))
        self.register_buffer("res", torch.tensor([int(low * b**n) for n in range(levels)]))
        self.register_buffer("primes", torch.tensor([1, 2654435761, 805459861]))
        self.register_buffer("corners", torch.tensor([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)]))
        self.tables = nn.ModuleList(nn.Embedding(size, features) for _ in range(levels))
        self.size = size
        for t in self.tables:
            nn.init.uniform_(t.weight, -1e-4, 1e-4)

    def forward(self, x):
        out = []
        for n, table in enumerate(self.tables):
            p = x * self.res[n]
            base = p.floor().long()
            f = p - base
            c = base[:, None] + self.corners
            h = (c * self.primes)
            index = (h[..., 0] ^ h[..., 1] ^ h[..., 2]) % self.size
            w = torch.where(self.corners.bool(), f[:, None], 1 - f[:, None]).prod(-1, keepdim=True)
            out.append((table(index) * w).sum(1))
        return torch.cat(out, -1)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.grid = HashGrid()
        self.sigma = nn.Sequential(nn.Linear(24, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False))
        self.rgb = nn.Sequential(nn.Linear(31, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 3, bias=False))

    def forward(self, x, d):
        h = self.sigma(self.grid(x))
        return torch.exp(h[:, 0].clamp(max=10)), torch.sigmoid(self.rgb(torch.cat([d, h], -1)))


def sh(d):
    x, y, z = d.unbind(-1)
    return torch.stack([x, y, z, x * y, y * z, x * z, x * x, y * y, z * z, x * y * z, x**3, y**3, z**3, x * x * y, y * y * z], -1)


field = Field().cuda()
opt = torch.optim.Adam([{"params": field.grid.parameters(), "eps": 1e-15}, {"params": [*field.sigma.parameters(), *field.rgb.parameters()], "weight_decay": 1e-6}], 1e-2, betas=(0.9, 0.99))
for step in range(6):
    rays, samples = 2048, 48
    o, d = torch.rand(rays, 1, 3, device="cuda"), F.normalize(torch.randn(rays, 1, 3, device="cuda"), dim=-1)
    t = torch.linspace(0, 1, samples, device="cuda") + torch.rand(rays, samples, device="cuda") / samples
    x = (o + d * t[..., None] * 0.3).clamp(0, 0.999).view(-1, 3)
    sigma, rgb = field(x, sh(d.expand(-1, samples, -1).reshape(-1, 3)))
    delta = F.pad(t[:, 1:] - t[:, :-1], (0, 1), value=0.02)
    alpha = 1 - torch.exp(-sigma.view(rays, samples) * delta)
    trans = torch.cumprod(F.pad(1 - alpha + 1e-10, (1, 0), value=1.0), -1)[:, :-1]
    weights = alpha * trans
    colour = (weights[..., None] * rgb.view(rays, samples, 3)).sum(1)
    loss = F.smooth_l1_loss(colour, torch.rand_like(colour)) + 1e-3 * -(weights * (weights + 1e-6).log()).sum(-1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
