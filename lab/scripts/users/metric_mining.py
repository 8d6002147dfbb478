"""Retrieval: multi-similarity and triplet losses with mined pairs, cdist, pdist uniformity, evaluation of recall."""

import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers, c = [], 3
        for o in (32, 64, 128, 256):
            layers += [nn.Conv2d(c, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.Mish(inplace=True)]
            c = o
        self.body = nn.Sequential(*layers)
        self.p = nn.Parameter(torch.ones(1) * 3)
        self.head = nn.Linear(256, 128)

    def forward(self, x):
        x = self.body(x).clamp(min=1e-6).pow(self.p)
        return F.normalize(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1).pow(1 / self.p)))


def hard_triplets(z, y, margin=0.3):
    d = torch.cdist(z, z)
    same = y[:, None] == y[None]
    eye = torch.eye(len(y), dtype=torch.bool, device=z.device)
    pos = d.masked_fill(~same | eye, -1).max(1).values
    neg = d.masked_fill(same, 1e4).min(1).values
    keep = pos > 0
    return F.relu(pos - neg + margin)[keep].mean()


def multi_similarity(z, y, a=2.0, b=50.0, base=0.5):
    s = z @ z.t()
    same = (y[:, None] == y[None]).float()
    p = torch.log1p((torch.exp(-a * (s - base)) * same).sum(1)) / a
    n = torch.log1p((torch.exp(b * (s - base)) * (1 - same)).sum(1)) / b
    return (p + n).mean()


net = Net().cuda()
opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
proxies = nn.Parameter(F.normalize(torch.randn(100, 128, device="cuda")))
opt.add_param_group({"params": [proxies], "lr": 0.5})
for step in range(5):
    net.train()
    x, y = torch.randn(256, 3, 96, 96, device="cuda"), torch.randint(0, 32, (256,), device="cuda")
    z = net(x)
    uniform = torch.pdist(z).pow(2).mul(-2).exp().mean().log()
    proxy = torch.cdist(z, F.normalize(proxies), p=1)
    loss = hard_triplets(z, y) + multi_similarity(z, y) + 0.1 * uniform + F.cross_entropy(-proxy, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    net.eval()
    with torch.no_grad():
        bank = torch.cat([net(torch.randn(128, 3, 96, 96, device="cuda")) for _ in range(4)])
        labels = torch.randint(0, 32, (512,), device="cuda")
        order = torch.cdist(bank, bank).fill_diagonal_(1e9).topk(4, largest=False).indices
        recall = (labels[order] == labels[:, None]).any(1).float().mean()
    print(step, loss.item(), recall.item())
