"""Normalising flow of images: actnorm initialised by data, 1x1 convolutions with slogdet, affine couplings, squeeze."""

import math, torch
from torch import nn
import torch.nn.functional as F


class ActNorm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x):
        if self.training and self.ready.item() == 0:
            with torch.no_grad():
                self.shift.copy_(-x.mean((0, 2, 3), keepdim=True))
                self.scale.copy_(-x.std((0, 2, 3), keepdim=True).clamp(min=1e-4).log())
                self.ready.fill_(1)
        return (x + self.shift) * self.scale.exp(), self.scale.sum() * x.shape[2] * x.shape[3]


class Inv(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w = nn.Parameter(torch.linalg.qr(torch.randn(c, c))[0])

    def forward(self, x):
        return F.conv2d(x, self.w[..., None, None]), torch.linalg.slogdet(self.w)[1] * x.shape[2] * x.shape[3]


class Coupling(nn.Module):
    def __init__(self, c, hidden=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(c // 2, hidden, 3, 1, 1), nn.ReLU(True), nn.Conv2d(hidden, hidden, 1), nn.ReLU(True), nn.Conv2d(hidden, c, 3, 1, 1)
        )
        nn.init.zeros_(self.net[-1].weight)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(s + 2)
        return torch.cat([a, (b + t) * s], 1), s.log().flatten(1).sum(1)


class Glow(nn.Module):
    def __init__(self, levels=3, steps=6):
        super().__init__()
        self.levels, c = nn.ModuleList(), 3
        for n in range(levels):
            c *= 4
            self.levels.append(nn.ModuleList(nn.ModuleList([ActNorm(c), Inv(c), Coupling(c)]) for _ in range(steps)))
            c //= 2

    def forward(self, x):
        total, logdet = 0.0, 0.0
        for n, level in enumerate(self.levels):
            x = F.pixel_unshuffle(x, 2)
            for step in level:
                for part in step:
                    x, d = part(x)
                    logdet = logdet + d
            x, z = x.chunk(2, 1)
            total = total - 0.5 * (z.pow(2) + math.log(2 * math.pi)).flatten(1).sum(1)
        return total - 0.5 * (x.pow(2) + math.log(2 * math.pi)).flatten(1).sum(1) + logdet


model = Glow().cuda()
opt = torch.optim.Adamax(model.parameters(), 1e-3)
for step in range(5):
    x = torch.rand(48, 3, 32, 32, device="cuda")
    bits = -model(x - 0.5).mean() / (3 * 32 * 32 * math.log(2))
    opt.zero_grad()
    bits.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 50)
    opt.step()
    print(step, bits.item())
