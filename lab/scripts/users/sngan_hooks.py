"""SNGAN: spectral norm by hooks, hinge loss, class-conditional batch norm, two time scales, EMA of the generator."""

import copy, torch
from torch import nn
from torch.nn.utils import spectral_norm
import torch.nn.functional as F


class CondBN(nn.Module):
    def __init__(self, c, classes):
        super().__init__()
        self.bn, self.embed = nn.BatchNorm2d(c, affine=False), nn.Embedding(classes, 2 * c)
        nn.init.normal_(self.embed.weight[:, :c], 1, 0.02), nn.init.zeros_(self.embed.weight[:, c:])

    def forward(self, x, y):
        g, b = self.embed(y).chunk(2, 1)
        return g[:, :, None, None] * self.bn(x) + b[:, :, None, None]


class G(nn.Module):
    def __init__(self, z=96, c=192, classes=10):
        super().__init__()
        self.c, self.fc = c, nn.Linear(z, c * 16)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(c, c, 4, 2, 1) for _ in range(3))
        self.bns = nn.ModuleList(CondBN(c, classes) for _ in range(4))
        self.out = nn.Conv2d(c, 3, 1)

    def forward(self, z, y):
        h = self.fc(z).view(-1, self.c, 4, 4)
        for bn, up in zip(self.bns, self.ups):
            h = up(F.relu(bn(h, y)))
        return torch.tanh(self.out(F.relu(self.bns[-1](h, y))))


class D(nn.Module):
    def __init__(self, c=128, classes=10):
        super().__init__()
        self.net = nn.Sequential(
            spectral_norm(nn.Conv2d(3, c, 1)), nn.LeakyReLU(0.1, True),
            spectral_norm(nn.Conv2d(c, c, 4, 2, 1)), nn.LeakyReLU(0.1, True),
            spectral_norm(nn.Conv2d(c, 2 * c, 4, 2, 1)), nn.LeakyReLU(0.1, True),
        )  # fmt: skip
        self.fc, self.embed = spectral_norm(nn.Linear(2 * c, 1)), spectral_norm(nn.Embedding(classes, 2 * c))

    def forward(self, x, y):
        h = self.net(x).sum((2, 3))
        return self.fc(h) + (self.embed(y) * h).sum(1, keepdim=True)


g, d = G().cuda(), D().cuda()
ema = copy.deepcopy(g).requires_grad_(False)
og, od = (torch.optim.Adam(m.parameters(), lr, betas=(0.0, 0.9)) for m, lr in ((g, 1e-4), (d, 4e-4)))
for step in range(5):
    for _ in range(2):
        x, y = torch.rand(64, 3, 32, 32, device="cuda") * 2 - 1, torch.randint(10, (64,), device="cuda")
        with torch.no_grad():
            fake = g(torch.randn(64, 96, device="cuda"), y)
        loss_d = F.relu(1 - d(x, y)).mean() + F.relu(1 + d(fake, y)).mean()
        od.zero_grad()
        loss_d.backward()
        od.step()
    y = torch.randint(10, (128,), device="cuda")
    loss_g = -d(g(torch.randn(128, 96, device="cuda"), y), y).mean()
    og.zero_grad()
    loss_g.backward()
    og.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), g.parameters()):
            a.lerp_(b, 0.01)
    print(step, loss_d.item(), loss_g.item())
