import torch, torch.nn as nn
from torch.distributions import MultivariateNormal, Normal


class Coupling(nn.Module):
    def __init__(self, d, hidden, mask):
        super().__init__()
        self.s = nn.Sequential(
            nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, d)
        )
        self.t = nn.Sequential(
            nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, d)
        )
        self.register_buffer("mask", mask)
        self.scale = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        m = self.mask
        s = self.s(x * m) * torch.exp(self.scale) * (1 - m)
        t = self.t(x * m) * (1 - m)
        return x * torch.exp(s) + t, s.sum(-1)

    def inverse(self, z):
        m = self.mask
        s = self.s(z * m) * torch.exp(self.scale) * (1 - m)
        t = self.t(z * m) * (1 - m)
        return (z - t) * torch.exp(-s)


class Flow(nn.Module):
    def __init__(self, d=64, layers=8, hidden=512):
        super().__init__()
        masks = [torch.arange(d) % 2 == i % 2 for i in range(layers)]
        self.layers = nn.ModuleList([Coupling(d, hidden, m.float()) for m in masks])
        self.register_buffer("loc", torch.zeros(d))
        self.register_buffer("cov", torch.eye(d))

    @property
    def base(self):
        return MultivariateNormal(self.loc, self.cov)

    def log_prob(self, x):
        total = torch.zeros(len(x), device=x.device)
        for l in self.layers:
            x, ld = l(x)
            total += ld
        return self.base.log_prob(x) + total

    @torch.no_grad()
    def sample(self, n):
        z = self.base.sample((n,))
        for l in reversed(self.layers):
            z = l.inverse(z)
        return z


flow = Flow().cuda()
opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
for i in range(10):
    x = Normal(0.0, 1.0).sample((8192, 64)).cuda()
    loss = -flow.log_prob(x).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 5 == 0:
        print(i, loss.item(), flow.sample(1000).std().item())
