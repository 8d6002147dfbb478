"""Neural spline flow: searchsorted, gather, rational quadratic bins, random permutations, float64 for the last layers."""

import torch
from torch import nn
import torch.nn.functional as F


def spline(x, w, h, d, bound=3.0, least=1e-3):
    k = w.shape[-1]
    inside = (x >= -bound) & (x <= bound)
    w, h = least + (1 - least * k) * w.softmax(-1), least + (1 - least * k) * h.softmax(-1)
    cw, ch = (F.pad(t.cumsum(-1), (1, 0)) * 2 * bound - bound for t in (w, h))
    d = F.pad(least + F.softplus(d), (1, 1), value=1.0)
    clipped = x.clamp(-bound + 1e-6, bound - 1e-6)
    i = torch.searchsorted(cw.contiguous(), clipped[..., None], right=True).clamp(1, k) - 1
    x0, y0, x1, y1 = cw.gather(-1, i)[..., 0], ch.gather(-1, i)[..., 0], cw.gather(-1, i + 1)[..., 0], ch.gather(-1, i + 1)[..., 0]
    d0, d1 = d.gather(-1, i)[..., 0], d.gather(-1, i + 1)[..., 0]
    slope, theta = (y1 - y0) / (x1 - x0), (clipped - x0) / (x1 - x0)
    t = theta * (1 - theta)
    den = slope + (d1 + d0 - 2 * slope) * t
    y = y0 + (y1 - y0) * (slope * theta.square() + d0 * t) / den
    logd = 2 * slope.log() + (d1 * theta.square() + 2 * slope * t + d0 * (1 - theta).square()).log() - 2 * den.log()
    return torch.where(inside, y, x), torch.where(inside, logd, torch.zeros_like(logd))


class Coupling(nn.Module):
    def __init__(self, dim=42, hidden=256, k=12):
        super().__init__()
        self.k, self.half = k, dim // 2
        self.net = nn.Sequential(nn.Linear(self.half, hidden), nn.ELU(), nn.BatchNorm1d(hidden), nn.Linear(hidden, hidden), nn.ELU(), nn.Linear(hidden, (dim - self.half) * (3 * k - 1)))
        self.register_buffer("perm", torch.randperm(dim))

    def forward(self, x):
        x = x[:, self.perm]
        a, b = x[:, : self.half], x[:, self.half :]
        w, h, d = self.net(a).view(len(x), -1, 3 * self.k - 1).split([self.k, self.k, self.k - 1], -1)
        b, logd = spline(b, w, h, d)
        return torch.cat([a, b], 1), logd.sum(1)


layers = nn.ModuleList(Coupling() for _ in range(8)).cuda()
opt = torch.optim.Rprop(layers.parameters(), 1e-3)
for step in range(5):
    x, total = torch.randn(2048, 42, device="cuda"), 0
    for n, layer in enumerate(layers):
        x, logd = layer(x)
        total = total + logd
    z = x.double()
    loss = -(total - 0.5 * (z.square() + 1.8378770664).sum(1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
