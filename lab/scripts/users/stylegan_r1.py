"""Generator with modulated convolutions, discriminator with R1, path length regularisation, EMA."""

import copy, math, random
import torch
from torch import nn, autograd, optim
from torch.nn import functional as F


class ModConv(nn.Module):
    def __init__(self, i, o, k, style=256, up=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, o, i, k, k))
        self.mod = nn.Linear(style, i)
        self.i, self.o, self.k, self.up = i, o, k, up

    def forward(self, x, s):
        b, c, h, w = x.shape
        s = self.mod(s).view(b, 1, c, 1, 1)
        weight = self.weight * s / math.sqrt(c * self.k**2)
        demod = torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8)
        weight = (weight * demod.view(b, self.o, 1, 1, 1)).view(b * self.o, c, self.k, self.k)
        if self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
        x = x.reshape(1, b * c, x.shape[2], x.shape[3])
        return F.conv2d(x, weight, padding=self.k // 2, groups=b).view(b, self.o, x.shape[2], x.shape[3])


class Generator(nn.Module):
    def __init__(self, size=32, style=256):
        super().__init__()
        self.style = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(style, style), nn.LeakyReLU(0.2))])
        self.const = nn.Parameter(torch.randn(1, 256, 4, 4))
        chans = [256, 256, 128, 64]
        self.convs = nn.ModuleList([ModConv(chans[n], chans[n + 1], 3, up=True) for n in range(3)])
        self.rgb = nn.Conv2d(64, 3, 1)

    def forward(self, z, return_latents=False):
        w = self.style(z)
        x = self.const.repeat(z.shape[0], 1, 1, 1)
        for c in self.convs:
            x = F.leaky_relu(
                c(x, w) + torch.randn(x.shape[0], 1, x.shape[2] * 2, x.shape[3] * 2, device=x.device) * 0.1, 0.2
            )
        return (self.rgb(x), w) if return_latents else (self.rgb(x), None)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(128, 256, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(256, 256, 3, 2, 1),
            nn.LeakyReLU(0.2),
        )
        self.final = nn.Sequential(
            nn.Conv2d(257, 256, 3, 1, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(256 * 16, 256),
            nn.LeakyReLU(0.2),
            nn.Linear(256, 1),
        )

    def forward(self, x):
        x = self.body(x)
        b, c, h, w = x.shape
        g = min(b, 4)
        std = (
            torch.sqrt(x.view(g, -1, 1, c, h, w).var(0, unbiased=False) + 1e-8)
            .mean([2, 3, 4], keepdims=True)
            .squeeze(2)
        )
        return self.final(torch.cat([x, std.repeat(g, 1, h, w)], 1))


def requires_grad(model, flag=True):
    for p in model.parameters():
        p.requires_grad = flag


def accumulate(m1, m2, decay=0.999):
    p1, p2 = dict(m1.named_parameters()), dict(m2.named_parameters())
    for k in p1:
        p1[k].data.mul_(decay).add_(p2[k].data, alpha=1 - decay)


device, batch = "cuda", 32
g, d = Generator().to(device), Discriminator().to(device)
ema = copy.deepcopy(g).eval()
g_optim = optim.Adam(g.parameters(), lr=0.002, betas=(0.0, 0.99))
d_optim = optim.Adam(d.parameters(), lr=0.002, betas=(0.0, 0.99))
mean_path = 0
for i in range(8):
    real = torch.randn(batch, 3, 32, 32, device=device)
    requires_grad(g, False)
    requires_grad(d, True)
    fake, _ = g(torch.randn(batch, 256, device=device))
    d_loss = F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()
    d.zero_grad()
    d_loss.backward()
    d_optim.step()
    if i % 2 == 0:
        real.requires_grad = True
        pred = d(real)
        (grad,) = autograd.grad(outputs=pred.sum(), inputs=real, create_graph=True)
        r1 = grad.pow(2).reshape(grad.shape[0], -1).sum(1).mean()
        d.zero_grad()
        (10 / 2 * r1 * 2 + 0 * pred[0]).backward()
        d_optim.step()
    requires_grad(g, True)
    requires_grad(d, False)
    fake, _ = g(torch.randn(batch, 256, device=device))
    g_loss = F.softplus(-d(fake)).mean()
    g.zero_grad()
    g_loss.backward()
    g_optim.step()
    if i % 4 == 0:
        fake, w = g(torch.randn(batch // 2, 256, device=device), return_latents=True)
        noise = torch.randn_like(fake) / math.sqrt(fake.shape[2] * fake.shape[3])
        (grad,) = autograd.grad(outputs=(fake * noise).sum(), inputs=w, create_graph=True)
        lengths = torch.sqrt(grad.pow(2).sum(1))
        path_mean = mean_path + 0.01 * (lengths.mean() - mean_path)
        g.zero_grad()
        ((lengths - path_mean).pow(2).mean() * 2 * 4).backward()
        g_optim.step()
        mean_path = path_mean.detach()
    accumulate(ema, g)
    print(f"{i}: d {d_loss.item():.3f} g {g_loss.item():.3f} r1 {r1.item():.3f}")
