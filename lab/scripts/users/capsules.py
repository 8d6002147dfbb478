"""Capsules: dynamic routing by agreement in einsum, margin loss, a masked decoder, ReduceLROnPlateau, gradient noise."""

import torch
from torch import nn
import torch.nn.functional as F


def squash(x):
    n = x.square().sum(-1, keepdim=True)
    return n / (1 + n) * x / (n.sqrt() + 1e-8)


class Caps(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, 128, 9), nn.Conv2d(128, 128, 9, 2)
        self.W = nn.Parameter(0.01 * torch.randn(classes, 576, 16, 8))
        self.decoder = nn.Sequential(nn.Linear(16 * classes, 512), nn.ReLU(True), nn.Linear(512, 1024), nn.ReLU(True), nn.Linear(1024, 784), nn.Sigmoid())

    def forward(self, x, y):
        u = squash(self.primary(F.relu(self.conv(x))).view(len(x), -1, 8))
        hat = torch.einsum("cnoi,bni->bcno", self.W, u)
        b = torch.zeros(hat.shape[:3], device=x.device)
        frozen = hat.detach()
        for r in range(3):
            c = b.softmax(1)
            v = squash(torch.einsum("bcn,bcno->bco", c, hat if r == 2 else frozen))
            if r < 2:
                b = b + torch.einsum("bco,bcno->bcn", v, frozen)
        lengths = v.norm(dim=-1)
        t = F.one_hot(y, 10).float()
        margin = t * F.relu(0.9 - lengths).square() + 0.5 * (1 - t) * F.relu(lengths - 0.1).square()
        return margin.sum(1).mean() + 0.0005 * F.mse_loss(self.decoder((v * t[..., None]).flatten(1)), x.flatten(1), reduction="sum") / len(x)


model = Caps().cuda()
opt = torch.optim.Adam(model.parameters())
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
for step in range(5):
    x, y = torch.rand(96, 1, 28, 28, device="cuda"), torch.randint(10, (96,), device="cuda")
    loss = model(x, y)
    opt.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=1e-5)
    opt.step()
    plateau.step(loss.detach())
    print(step, loss.item())
